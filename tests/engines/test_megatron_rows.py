"""The rows of context-parallel ranks, put together again, are the whole row: tokens, positions and targets. So is a row
that has each shared prompt once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

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


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=4)
)
@settings(deadline=None)
def test_a_row_of_shared_prompts_predicts_the_same_tokens_from_the_same_keys(groups: list) -> None:
    from stages.backends.megatron.microbatches import row_of, tokens_of
    from stages.backends.megatron.slices import Slices

    heads = [torch.arange(size) + 1000 * (i + 1) for i, (size, _) in enumerate(groups)]
    prompts = Ragged.of([head for head, (_, responses) in zip(heads, groups) for _ in responses])
    responses = ragged(tuple(size for _, sizes in groups for size in sizes), 5000)
    plain = Microbatch(tuple(range(len(prompts))), max(prompts.lengths), max(responses.lengths))
    shared = Microbatch(plain.samples, plain.prompt, plain.response, tuple(len(sizes) for _, sizes in groups))
    for multiple, least in ((1, 0), (3, 0), (2, 90)):
        how = {"packed": True, "multiple": multiple, "slices": Slices()}
        count = tokens_of(prompts, responses, shared, **how)
        saved = sum(size * (len(sizes) - 1) for size, sizes in groups)
        computed = sum(prompts.lengths) + sum(responses.lengths) - len(prompts)
        assert count == -(-(computed - saved) // multiple) * multiple
        one, two = (row_of(prompts, responses, row, **how, least=least, device=CPU) for row in (plain, shared))
        size = two.ids_NS.shape[1]
        assert size == max(count, -(-least // multiple) * multiple) == two.packed.cu_seqlens_q[-1]
        assert torch.equal(one.targets_M, two.targets_M) and torch.equal(one.mask, two.mask)
        queries, keys = two.packed.cu_seqlens_q.diff(), two.packed.cu_seqlens_kv.diff()
        assert (queries > 0).all() and (queries <= keys).all()
        assert (two.packed.max_seqlen_q, two.packed.max_seqlen_kv) == (queries.max(), keys.max())
        seen = {}  # by position of the row: what it attends to, itself last
        at = two.packed.keys_K.split(keys.tolist())
        for start, length, held in zip(two.packed.cu_seqlens_q.tolist(), queries.tolist(), at):
            for i in range(length):
                seen[start + i] = held[: len(held) - length + i + 1]
        starts = one.packed.cu_seqlens_q.tolist()
        for mine, theirs in zip(one.keep_M.tolist(), two.keep_M.tolist()):
            start = max(s for s in starts if s <= mine)
            assert torch.equal(one.ids_NS[0, start : mine + 1], two.ids_NS[0, seen[theirs]])
            assert torch.equal(one.positions_S[start : mine + 1], two.positions_S[seen[theirs]])


def test_the_gradient_of_gathered_keys_sums_all_their_uses() -> None:
    from stages.backends.megatron.copies import gathered

    index = torch.tensor([0, 1, 0, 1, 2, 1])
    values = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gathered(values, index), values[index])
    assert torch.autograd.gradcheck(lambda each: gathered(each, index), values)
    half = values.detach().bfloat16().requires_grad_()
    slopes = torch.full((6, 3), 1.0, dtype=torch.bfloat16)
    slopes[0], slopes[2] = 256.0, -256.0
    gathered(half, index).backward(slopes)
    assert half.grad is not None and half.grad[:, 0].tolist() == [0.0, 3.0, 1.0, 0.0]


class Kernel(torch.autograd.Function):
    """Keeps its inputs for the backward pass, as attention kernels do, one of them in another shape."""

    @staticmethod
    def forward(ctx: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(keys, values[:, 0])
        return keys * values[:, 0]

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = ctx.saved_tensors
        return slopes[0] * values, (slopes[0] * keys)[:, None]


def by_sample(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor,
    longest: int, farthest: int, *, scale: float | None, window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """torch's `varlen_attn` on a CPU: the last query is that of the last key."""
    assert (longest, farthest, window_size) == (queries.diff().max(), keys.diff().max(), (-1, 0))
    made = []
    for q, k, v in zip(
        *(each.split(at.diff().tolist()) for each, at in ((query, queries), (key, keys), (value, keys)))
    ):
        seen = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
        made.append(
            scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), attn_mask=seen, scale=scale)
        )
    return torch.cat(made, 1).transpose(0, 1)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_kernel_over_shared_prompts_gives_what_section_by_section_gives(
    recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.backends.megatron import attention
    from stages.backends.megatron.microbatches import row_of
    from stages.backends.megatron.slices import Slices

    monkeypatch.setattr(attention, "varlen_attn", by_sample)
    microbatch = Microbatch((0, 1, 2, 3, 4), 5, 6, (3, 1, 1))
    columns = ragged((4, 4, 4, 5, 2), 0), ragged((6, 1, 3, 2, 5), 0)
    columns[0].values[:12] = torch.arange(4).repeat(3)
    row = row_of(*columns, microbatch, packed=True, multiple=4, slices=Slices(), least=0, device=CPU)
    core, made = attention.CausalAttention(SimpleNamespace()), torch.Generator().manual_seed(3)  # type: ignore[arg-type]
    core.recomputed = recomputed
    tokens = row.ids_NS.shape[1]
    given = [torch.randn(tokens, 1, heads, 8, generator=made, requires_grad=True) for heads in (4, 2, 2)]
    one = core(*given, packed_seq_params=row.packed)
    two = core._packed(*given, row.packed).flatten(-2)
    slope = torch.randn(one.shape, generator=made)
    torch.testing.assert_close(one, two)
    for wanted, found in zip(*(torch.autograd.grad(each, given, slope) for each in (one, two))):
        torch.testing.assert_close(found, wanted)


def test_a_kernel_keeps_the_keys_of_a_row_and_not_their_copies() -> None:
    from stages.backends.megatron.copies import gathered, with_copies

    index = torch.tensor([0, 1, 0, 1, 2, 0, 1, 3])
    made = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(shape, generator=made, requires_grad=True) for shape in ((4, 3), (4, 1, 3)))
    slope = torch.randn(8, 3, generator=made)
    plain = Kernel.apply(gathered(keys, index), gathered(values, index))
    wanted = torch.autograd.grad(plain, (keys, values), slope)
    found = with_copies(Kernel.apply, keys, values, index)
    assert torch.equal(found, plain)
    assert all(torch.equal(*pair) for pair in zip(torch.autograd.grad(found, (keys, values), slope), wanted))
    found = with_copies(Kernel.apply, keys, values, index)
    with torch.no_grad():
        keys.zero_(), values.zero_()
    assert not any(each.any() for each in torch.autograd.grad(found, (keys, values), slope)), "copies were kept"
