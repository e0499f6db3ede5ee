"""Slices of packed rows: put together again they are the whole row, and their rule is Transformer Engine's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.packing import ranges
from stages.backends.megatron.slices import Slices, found

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
RANKS = st.integers(1, 5)


def partitioned(starts: list[int], ranks: int, rank: int) -> list[int]:
    """Return the positions that thd_partition_indices_kernel of Transformer Engine computes, token by token
    (common/fused_attn/context_parallel.cu); `starts` are the padded starts of the samples."""
    own_starts = [start // ranks for start in starts]
    made = []
    for token in range(own_starts[-1]):
        sample = max(i for i, start in enumerate(own_starts[:-1]) if start <= token)
        length = own_starts[sample + 1] - own_starts[sample]
        index = token - own_starts[sample]
        chunk = rank if index < length // 2 else (ranks - 1) * 2 - rank
        made.append(index + own_starts[sample] * ranks + length // 2 * chunk)
    return made


@given(LENGTHS, RANKS)
def test_slices_put_together_again_are_the_whole_row(lengths: list[int], ranks: int) -> None:
    cuts = [Slices(rank=rank, ranks=ranks) for rank in range(ranks)]
    padded = cuts[0].padded(lengths)
    row = torch.arange(sum(padded)) * 3 + 1
    again = torch.full_like(row, -1)
    for cut in cuts:
        own = cut.positions(padded)
        assert len(own) == len(row) // ranks
        assert (again[own] == -1).all()
        again[own] = row[own]
    assert torch.equal(again, row)


@given(LENGTHS, RANKS)
def test_padding_is_the_least_that_two_chunks_per_rank_need(lengths: list[int], ranks: int) -> None:
    multiple = 2 * ranks if ranks > 1 else 1
    for length, padded in zip(lengths, Slices(ranks=ranks).padded(lengths)):
        assert length <= padded < length + multiple
        assert padded % multiple == 0


@given(LENGTHS, st.integers(2, 5), st.data())
def test_the_rule_is_that_of_transformer_engine(lengths: list[int], ranks: int, data: st.DataObject) -> None:
    cut = Slices(rank=data.draw(st.integers(0, ranks - 1)), ranks=ranks)
    padded = cut.padded(lengths)
    starts = [sum(padded[:i]) for i in range(len(padded) + 1)]
    assert cut.positions(padded).tolist() == partitioned(starts, ranks, cut.rank)


@given(LENGTHS, RANKS)
def test_causal_attention_costs_all_ranks_about_the_same(lengths: list[int], ranks: int) -> None:
    """Pairs of query and key: equal for all ranks up to the tokens' place within their chunks, that is exactly."""
    padded = Slices(ranks=ranks).padded(lengths)
    inside = torch.cat([torch.arange(size) for size in padded])
    costs = {int((inside[Slices(rank=rank, ranks=ranks).positions(padded)] + 1).sum()) for rank in range(ranks)}
    assert len(costs) == 1


@given(LENGTHS, RANKS, st.data())
def test_each_wanted_position_is_found_on_one_rank(lengths: list[int], ranks: int, data: st.DataObject) -> None:
    padded = Slices(ranks=ranks).padded(lengths)
    size = sum(padded)
    wanted = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=20)), dtype=torch.long)
    seen = torch.zeros(len(wanted), dtype=torch.long)
    for rank in range(ranks):
        own = Slices(rank=rank, ranks=ranks).positions(padded)
        here, index = found(own, wanted, size)
        assert torch.equal(own[index], wanted[here])
        assert here.tolist() == sorted(here.tolist())
        seen[here] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("starts", "sizes", "wanted"),
    [([0, 10], [2, 3], [0, 1, 10, 11, 12]), ([5], [0], []), ([4, 1, 9], [1, 0, 2], [4, 9, 10])],
)
def test_ranges(starts: list[int], sizes: list[int], wanted: list[int]) -> None:
    assert ranges(torch.tensor(starts), torch.tensor(sizes)).tolist() == wanted
