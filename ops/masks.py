"""Masks for ragged rows padded to a rectangle. A masked entry, even NaN, affects no value and no gradient.

    mask_NT = length_mask([3, 1], 4)                       # [[1, 1, 1, 0], [1, 0, 0, 0]]

Legend: N samples, T tokens, ... any shape. A mask is bool, or numbers in which 0 means masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def length_mask(lengths_N: torch.Tensor | Sequence[int], tokens: int) -> torch.Tensor:
    """Return bool [N, tokens] with the first `lengths_N[i]` entries of row i True. Raises ValueError for a length
    outside 0 to `tokens`."""
    lengths = torch.as_tensor(lengths_N)
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > tokens):
        raise ValueError(f"lengths from {int(lengths.min())} to {int(lengths.max())} do not fit in {tokens} tokens")
    return torch.arange(tokens, device=lengths.device)[None, :] < lengths[:, None]


def blank(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` with masked entries set to 0. Selects instead of multiplying: 0 * NaN would be NaN."""
    return torch.where(mask.bool(), values, 0)


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the sum of the unmasked entries, over all dimensions or one."""
    kept = blank(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the mean of the unmasked entries, over all dimensions or one; 0 if there are none."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)
