"""Keys and values copied for attention over shared prompts: gathered for a kernel, not kept until the backward pass.

A prompt's keys are copied for each sample that attends to them, which can be many times the row. A kernel saves its
inputs for the backward pass; here it saves the row's own keys and values, and the copies are gathered again. Knows
tensors only.

Legend: S positions of the row, K positions of the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Gathered(torch.autograd.Function):
    """Rows of a tensor by index. The gradient of a row that is used often is summed in float32."""

    @staticmethod
    def forward(ctx: Any, values_S: torch.Tensor, index_K: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_K)
        ctx.rows = len(values_S)
        return values_S.index_select(0, index_K)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope_K,), (index_K,) = slopes, ctx.saved_tensors
        wide = torch.promote_types(slope_K.dtype, torch.float32)
        made_S = slope_K.new_zeros(ctx.rows, *slope_K.shape[1:], dtype=wide)
        return made_S.index_add_(0, index_K, slope_K.to(wide)).to(slope_K.dtype), None


def gathered(values_S: torch.Tensor, index_K: torch.Tensor) -> torch.Tensor:
    """Entries of a tensor by index, [K, ...]; differentiable."""
    made: torch.Tensor = _Gathered.apply(values_S, index_K)
    return made


def with_copies(
    attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    key_S: torch.Tensor,
    value_S: torch.Tensor,
    index_K: torch.Tensor,
    *,
    keep: bool = False,
) -> torch.Tensor:
    """`attend(keys, values)` of the copies that `index` names. What it saves of them for the backward pass is gathered
    again there, unless `keep`, which is right where activation recomputation drops everything that is saved."""
    copies = [gathered(each_S, index_K) for each_S in (key_S, value_S)]
    if keep:
        return attend(*copies)
    sources = {copy.data_ptr(): each_S.detach() for copy, each_S in zip(copies, (key_S, value_S))}
    size = {copy.data_ptr(): copy.numel() for copy in copies}

    def saved(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Size]:
        place = tensor.data_ptr()
        if place not in sources or tensor.numel() != size[place] or not tensor.is_contiguous():
            return tensor
        return sources[place], tensor.shape

    def again(kept: torch.Tensor | tuple[torch.Tensor, torch.Size]) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        source_S, shape = kept
        return source_S.index_select(0, index_K).view(shape)

    with saved_tensors_hooks(saved, again):
        return attend(*copies)
