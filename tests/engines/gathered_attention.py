"""Attention over slices of packed rows on the CPU instead of Transformer Engine's: every rank gathers all keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from stages.backends.megatron.slices import Slices


class GatheredAttention(MegatronModule):
    """The `core_attention` of a layer. The mask is built from the positions that each rank holds."""

    def __init__(self, config: TransformerConfig, **given: Any) -> None:
        super().__init__(config=config)
        self.scale = given.get("softmax_scale")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams,
        **__: Any,
    ) -> torch.Tensor:
        """Returns [S, 1, H * D] of [S, 1, H, D] queries, S being this rank's positions."""
        assert torch.equal(packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded)
        group = parallel_state.get_context_parallel_group()
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        held = [Slices(rank=rank, ranks=group.size()).positions(lengths) for rank in range(group.size())]
        sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        mine, theirs = held[group.rank()][:, None], torch.cat(held)[None]
        mask = (sample[mine] == sample[theirs]) & (theirs <= mine)
        keys, values = (_Gathered.apply(each, group) for each in (key, value))
        sides = (each.permute(1, 2, 0, 3) for each in (query, keys, values))
        made = scaled_dot_product_attention(*sides, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return made.permute(2, 0, 1, 3).flatten(-2)


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks, joined; each rank's gradient is the sum of what all ranks have for its own part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        made = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(made, own.contiguous(), group=group)
        return torch.cat(made)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None
