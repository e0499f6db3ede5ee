"""Which positions of a packed row each context-parallel rank computes. Arithmetic only: no model, no processes.

    cut = Slices(rank=0, ranks=2)
    lengths = cut.padded([5, 9])           # [8, 12]
    row[cut.positions(lengths)]            # positions 0 1 6 7 of the first sample, 0 1 2 9 10 11 of the second

Each sample is padded to 2 x ranks equal chunks. Rank r computes chunks r and 2 x ranks - 1 - r: one that attends to
little and one that attends to much, so that causal attention costs all ranks the same. Transformer Engine's attention
requires this rule (tex.thd_get_partitioned_indices, which Megatron-core's get_thd_batch_on_this_cp_rank applies).

Legend: N samples, S positions of a row, C chunks of one rank (two per sample), R entries to look up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ops.packing import ranges


@dataclass(frozen=True, kw_only=True)
class Slices:
    """How `ranks` ranks divide the samples of a row; `rank` is this one."""

    rank: int = 0
    ranks: int = 1

    @property
    def multiple(self) -> int:
        """The number of positions of each sample, padding included, is a multiple of this; 1 without slices."""
        return 2 * self.ranks if self.ranks > 1 else 1

    def padded(self, lengths_N: Sequence[int]) -> list[int]:
        """The positions of each sample, padding included, from its number of tokens."""
        return [-(-length // self.multiple) * self.multiple for length in lengths_N]

    def positions(self, lengths_N: Sequence[int]) -> torch.Tensor:
        """This rank's positions in a row of samples of padded lengths, ascending: int64 [S / ranks], on the CPU."""
        if self.ranks == 1:
            return torch.arange(sum(lengths_N))
        size_N = torch.tensor(lengths_N)
        chunk_N = size_N // (2 * self.ranks)
        start_N = size_N.cumsum(0) - size_N
        chunks = (self.rank, 2 * self.ranks - 1 - self.rank)
        start_C = torch.stack([start_N + chunk * chunk_N for chunk in chunks], dim=1).flatten()
        return ranges(start_C, chunk_N.repeat_interleave(2))


def found(positions_S: torch.Tensor, wanted_R: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of `wanted` that are among `positions` of a row of `size`, ascending, and the index of each there."""
    index = torch.full((size,), -1)
    index[positions_S] = torch.arange(len(positions_S))
    here = (index[wanted_R] >= 0).nonzero()[:, 0]
    return here, index[wanted_R[here]]
