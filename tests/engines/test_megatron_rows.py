"""The rows of context-parallel ranks, put together again, are the whole row: tokens, positions and targets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Microbatch
from tests.optional import need

CPU = torch.device("cpu")
SAMPLES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    need("megatron", "megatron")


def ragged(lengths: tuple[int, ...], first: int) -> Ragged:
    """Token ids that are all different."""
    return Ragged(torch.arange(first, first + sum(lengths)), lengths)


@given(SAMPLES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 150))
@settings(deadline=None)
def test_slices_of_a_row_are_the_whole_row(
    samples: list[tuple[int, int]], ranks: int, multiple: int, least: int
) -> None:
    from stages.backends.megatron.microbatches import row_of, tokens_of
    from stages.backends.megatron.slices import Slices

    prompts, responses = (tuple(sample[i] for sample in samples) for i in range(2))
    columns = ragged(prompts, 1000), ragged(responses, 5000)
    microbatch = Microbatch(tuple(range(len(samples))), max(prompts), max(responses))

    def rows(of: int, least: int) -> list:
        how = {"packed": True, "multiple": multiple, "least": least, "device": CPU}
        return [row_of(*columns, microbatch, slices=Slices(rank=rank, ranks=of), **how) for rank in range(of)]

    (whole,), sliced = rows(1, 0), rows(ranks, least)
    count = tokens_of(*columns, microbatch, packed=True, multiple=multiple, slices=Slices(ranks=ranks))
    sizes = {row.ids_NS.shape[1] for row in sliced}
    assert len(sizes) == 1
    size = sizes.pop()
    assert size % multiple == 0
    assert count <= size * ranks < max(count, least) + 2 * ranks * multiple

    targets = torch.zeros(sum(responses), dtype=torch.long)
    predicts = torch.zeros(sum(responses), dtype=torch.long)
    inputs = []
    for row in sliced:
        here = torch.arange(len(targets)) if row.here_M is None else row.here_M
        assert (targets[here] == 0).all()
        targets[here], predicts[here] = row.targets_M, row.ids_NS[0, row.keep_M]
        inputs += list(zip(row.ids_NS[0].tolist(), row.positions_S.tolist()))
        assert torch.equal(row.mask, whole.mask)
        starts = row.packed.cu_seqlens_q
        assert starts[-1] == size * ranks and row.packed.max_seqlen_q == starts.diff().max()
        assert (row.packed.cu_seqlens_q_padded is starts) == (ranks > 1)
    assert torch.equal(targets, whole.targets_M)
    assert torch.equal(predicts, whole.ids_NS[0, whole.keep_M])
    wanted = zip(whole.ids_NS[0].tolist(), whole.positions_S.tolist())
    assert sorted(pair for pair in inputs if pair[0]) == sorted(pair for pair in wanted if pair[0])
