"""Sharding a batch over ranks: no sample lost, equal shapes, budgets kept; for random lengths."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import KVBatchMeta
from pipeline.declare.partition import _level, exchanged, rows_within, spread
from pipeline.declare.sharding import (
    Dynamic,
    Microbatch,
    Packed,
    Plain,
    Shard,
    Sharding,
    Update,
    balance,
    check_equal,
    shard_batch,
    waste,
)
from tests.examples import few

HARD_BUDGET = 2048


@st.composite
def batches(draw, divisible=True):
    """Draw arguments of shard_batch that can be planned: ranks divide a minibatch, every sample fits the budget."""
    ranks, minibatches = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    size = draw(st.integers(1, 8)) * ranks + (0 if divisible else draw(st.integers(0, ranks - 1)))
    samples = size * minibatches
    longest = draw(st.sampled_from([3, 40, 700]))
    lengths = st.lists(st.integers(0, longest), min_size=samples, max_size=samples)
    prompts, responses = draw(lengths), draw(lengths)
    whole = max(1, *map(sum, zip(prompts, responses)))
    budget = draw(st.integers(whole, 4 * whole + 1))
    mode = draw(st.sampled_from([Plain(0), Plain(1), Plain(draw(st.integers(1, 9))), Dynamic(budget), Packed(budget)]))
    quadratic = draw(st.sampled_from([0.0, 0.01]))
    return {
        "prompts": prompts,
        "responses": responses,
        "ranks": ranks,
        "microbatching": mode,
        "minibatches": minibatches,
        "quadratic": quadratic,
    }


def members(shard, update):
    """Return the batch positions of the samples in an update of a shard."""
    return [shard.index[i] for microbatch in update.microbatches for i in microbatch.samples]


def check_whole(shards, arguments):
    """Check that every sample occurs once, minibatches are independent of the ranks, and normalizers are global."""
    prompts, responses, minibatches = arguments["prompts"], arguments["responses"], arguments["minibatches"]
    assert [shard.rank for shard in shards] == list(range(arguments["ranks"]))
    assert {shard.ranks for shard in shards} == {arguments["ranks"]}
    assert sorted(i for shard in shards for i in shard.index) == list(range(len(prompts)))
    size = len(prompts) // minibatches
    for shard in shards:
        assert list(shard.index) == sorted(shard.index)
        assert sorted(i for u in shard.updates for m in u.microbatches for i in m.samples) == list(
            range(len(shard.index))
        )
        assert len(shard.updates) == minibatches
        assert all(microbatch.samples for update in shard.updates for microbatch in update.microbatches)
    for number, updates in enumerate(zip(*(shard.updates for shard in shards))):
        run = range(number * size, (number + 1) * size)
        assert sorted(i for shard, update in zip(shards, updates) for i in members(shard, update)) == list(run)
        for update in updates:
            assert (update.tokens, update.samples) == (sum(responses[i] for i in run), size)


def check_budget(shards, arguments):
    """Check that rectangles cover the samples and no microbatch exceeds its budget."""
    prompts, responses, mode = arguments["prompts"], arguments["responses"], arguments["microbatching"]
    for shard in shards:
        assert shard.packed == isinstance(mode, Packed)
        for update in shard.updates:
            for microbatch in update.microbatches:
                at = [shard.index[i] for i in microbatch.samples]
                assert list(microbatch.samples) == sorted(microbatch.samples)
                assert microbatch.response >= max(responses[i] for i in at)
                assert microbatch.prompt + microbatch.response >= max(prompts[i] + responses[i] for i in at)
                assert microbatch.prompt >= 0
                match mode:
                    case Plain(samples=samples):
                        assert len(at) <= (samples or len(prompts))
                        assert (microbatch.prompt, microbatch.response) == (max(prompts), max(responses))
                    case Dynamic(tokens=tokens):
                        assert len(at) * (microbatch.prompt + microbatch.response) <= tokens
                    case Packed(tokens=tokens):
                        assert sum(prompts[i] + responses[i] for i in at) <= tokens


@settings(max_examples=few(250), deadline=None)
@given(batches())
def test_ranks_that_meet_have_equal_shapes_and_every_sample_once(arguments):
    shards = shard_batch(**arguments)
    check_whole(shards, arguments)
    check_budget(shards, arguments)
    for updates in zip(*(shard.updates for shard in shards)):
        assert len({len(update.microbatches) for update in updates}) == 1
        for together in zip(*(update.microbatches for update in updates)):
            assert len({(microbatch.prompt, microbatch.response) for microbatch in together}) == 1
    check_equal(shards)
    assert shard_batch(**arguments) == shards


@settings(max_examples=few(120), deadline=None)
@given(batches(divisible=False))
def test_a_rank_that_packs_its_own_share_keeps_the_budget_without_equal_counts(arguments):
    shards = shard_batch(**arguments, equal=False)
    check_whole(shards, arguments)
    check_budget(shards, arguments)
    for updates in zip(*(shard.updates for shard in shards)):
        counts = [len(members(shard, update)) for shard, update in zip(shards, updates)]
        assert max(counts) - min(counts) <= 1


@settings(max_examples=few(150), deadline=None)
@given(batches(divisible=False), st.sampled_from([Dynamic, Packed]), st.integers(1, 60))
def test_what_does_not_divide_is_equal_too_or_an_error(arguments, mode, above):
    longest = max(map(sum, zip(arguments["prompts"], arguments["responses"])))
    arguments["microbatching"] = mode(longest + above)
    try:
        shards = shard_batch(**arguments)
    except ValueError as error:
        assert "do not fit" in str(error) or "need a multiple" in str(error)
        assert len(arguments["prompts"]) // arguments["minibatches"] % arguments["ranks"]
    else:
        check_whole(shards, arguments)
        check_budget(shards, arguments)
        check_equal(shards)


@settings(max_examples=few(60), deadline=None)
@given(batches())
def test_which_samples_an_update_sees_does_not_depend_on_the_ranks(arguments):
    by_ranks = []
    for ranks in {1, arguments["ranks"]}:
        shards = shard_batch(**arguments | {"ranks": ranks})
        by_ranks.append(
            [
                (
                    sorted(i for s, u in zip(shards, updates) for i in members(s, u)),
                    updates[0].tokens,
                    updates[0].samples,
                )
                for updates in zip(*(shard.updates for shard in shards))
            ]
        )
    assert by_ranks[0] == by_ranks[-1]


@settings(max_examples=few(60), deadline=None)
@given(batches())
def test_a_shard_survives_the_handle_it_travels_in(arguments):
    prompts = arguments["prompts"]
    for shard in shard_batch(**arguments):
        assert msgspec.convert(msgspec.to_builtins(shard), Shard) == shard
        assert msgspec.json.decode(msgspec.json.encode(shard), type=Shard) == shard
        keys = tuple(f"{i:08d}_g000" for i in shard.index)
        handle = KVBatchMeta(keys=keys, partition_id="train", fields=(), extra_info={"shard": shard})
        received = KVBatchMeta.decode(handle.encode()).extra_info["shard"]
        assert msgspec.convert(received, Shard) == shard
        assert len(msgspec.json.encode(shard)) < 100 * len(shard.index) + 20 * len(shard.updates) + 40, len(prompts)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 7), st.randoms())
def test_one_rank_plain_is_runs_in_canonical_order(size, minibatches, samples, rng):
    count = size * minibatches
    prompts, responses = ([rng.randrange(50) for _ in range(count)] for _ in range(2))
    (shard,) = shard_batch(prompts, responses, ranks=1, microbatching=Plain(samples), minibatches=minibatches)
    assert shard.index == tuple(range(count))
    step = samples or size
    pads = max(prompts), max(responses)
    for number, update in enumerate(shard.updates):
        run = range(number * size, (number + 1) * size)
        assert update.microbatches == tuple(Microbatch(tuple(run[i : i + step]), *pads) for i in range(0, size, step))


def ffd(sizes, budget):
    """Return how many rows textbook first-fit decreasing makes."""
    rows = []
    for size in sorted(sizes, reverse=True):
        row = next((i for i, used in enumerate(rows) if used + size <= budget), None)
        if row is None:
            rows.append(size)
        else:
            rows[row] += size
    return len(rows)


@settings(max_examples=few(150), deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=60),
    st.integers(0, 120),
    st.integers(1, 4),
)
def test_rows_are_never_more_than_first_fit_decreasing_makes(sizes, above, multiple):
    budget = max(sizes) + above
    rows = rows_within(budget, range(len(sizes)), sizes, sizes, multiple)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    assert all(row and sum(sizes[i] for i in row) <= budget for row in rows)
    fewest = ffd(sizes, budget)
    rounded = -(-fewest // multiple) * multiple
    if rounded <= len(sizes):
        assert len(rows) % multiple == 0 and len(rows) <= rounded
    else:
        assert len(rows) <= fewest or len(rows) % multiple == 0


def lengths(kind, count, seed=0):
    rng = random.Random(seed)
    prompts = [rng.randrange(20, 200) for _ in range(count)]
    draw = {
        "uniform": lambda: rng.randrange(1, 1800),
        "lognormal": lambda: min(int(rng.lognormvariate(6, 1)), 1800),
        "bimodal": lambda: rng.randrange(50, 200) if rng.random() < 0.8 else rng.randrange(1200, 1800),
    }[kind]
    return prompts, [draw() for _ in range(count)]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("kind", ["uniform", "lognormal", "bimodal"])
@pytest.mark.parametrize("mode", [Plain(4), Dynamic(8192), Packed(HARD_BUDGET), Packed(8192)])
def test_ranks_balance_better_than_when_dealt_by_length(kind, ranks, mode):
    prompts, responses = lengths(kind, 256)
    total = [p + r for p, r in zip(prompts, responses)]
    order = sorted(range(256), key=total.__getitem__, reverse=True)
    dealt = [sum(total[i] for i in order[rank::ranks]) for rank in range(ranks)]
    ours = balance(shard_batch(prompts, responses, ranks=ranks, microbatching=mode), prompts, responses)
    assert 1 <= ours < max(dealt) * ranks / sum(dealt)
    assert ours < 1.005


def test_a_quadratic_cost_is_what_ranks_balance():
    prompts, responses = [0] * 64, [1 + i * i for i in range(64)]
    by_tokens = shard_batch(prompts, responses, ranks=4, microbatching=Packed(4096))
    by_cost = shard_batch(prompts, responses, ranks=4, microbatching=Packed(4096), quadratic=1.0)
    assert balance(by_cost, prompts, responses, quadratic=1.0) < balance(by_tokens, prompts, responses, quadratic=1.0)
    assert balance(by_tokens, prompts, responses) < balance(by_cost, prompts, responses)


@pytest.mark.parametrize("quadratic", [9.62e-5, 1.42e-5])  # 1 / tokens, of Qwen3-0.6B's and Qwen2-7B's shape
def test_lengths_to_32k_are_balanced_by_the_cost_of_attention(quadratic):
    rng = random.Random(0)
    prompts = [rng.randint(64, 1024) for _ in range(256)]
    responses = [min(int(rng.lognormvariate(8.5, 1)), 31744) for _ in range(256)]
    by_tokens, by_cost = (
        shard_batch(prompts, responses, ranks=8, microbatching=Packed(33792), quadratic=q) for q in (0.0, quadratic)
    )
    check_equal(by_cost)
    assert balance(by_tokens, prompts, responses, quadratic) > 1.04
    assert balance(by_cost, prompts, responses, quadratic) < 1.03
    assert {shard.imbalance for shard in by_cost} == {balance(by_cost, prompts, responses, quadratic)}


@pytest.mark.parametrize("ranks, most", [(1, 0.03), (8, 0.12)])
def test_dynamic_pads_whole_samples_not_prompts_and_responses_apart(ranks, most):
    prompts, responses = lengths("lognormal", 512)
    prompts = [prompts[i // 8] for i in range(512)]
    shards = shard_batch(prompts, responses, ranks=ranks, microbatching=Dynamic(8192))
    assert waste(shards, prompts, responses) < most
    fewest = -(-(sum(prompts) + sum(responses)) // 8192 // ranks)
    assert len(shards[0].updates[0].microbatches) <= 1.5 * fewest


@settings(max_examples=few(60), deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(0, 40))
def test_no_cut_of_sorted_samples_is_cheaper(totals, above):
    """All cuts, by brute force: the computed tokens plus 1/16 of the budget per microbatch."""
    totals.sort(reverse=True)
    budget = totals[0] + above
    found = []
    for cuts in range(2 ** (len(totals) - 1)):
        edges = [0, *(i + 1 for i in range(len(totals) - 1) if cuts >> i & 1), len(totals)]
        parts = [(stop - start) * totals[start] for start, stop in pairwise(edges)]
        if max(parts) <= budget:
            found.append(sum(parts) + len(parts) * budget / 16)
    (shard,) = shard_batch([0] * len(totals), totals, ranks=1, microbatching=Dynamic(budget))
    made = [len(m.samples) * (m.prompt + m.response) for m in shard.updates[0].microbatches]
    assert sum(made) + len(made) * budget / 16 == pytest.approx(min(found))


@pytest.mark.parametrize("by", ["all tokens", "response"])
@pytest.mark.parametrize("kind", ["uniform", "lognormal", "bimodal"])
def test_dynamic_pads_less_than_runs_of_sorted_samples(kind, by):
    prompts, responses = lengths(kind, 1024)
    keys = responses if by == "response" else [p + r for p, r in zip(prompts, responses)]
    budget, rows, pads, padded = 8192, 0, (0, 0), 0
    for i in sorted(range(1024), key=keys.__getitem__, reverse=True):
        wider = max(pads[0], prompts[i]), max(pads[1], responses[i])
        if (rows + 1) * sum(wider) > budget:
            padded += rows * sum(pads)
            rows, wider = 0, (prompts[i], responses[i])
        rows, pads = rows + 1, wider
    padded += rows * sum(pads)
    ours = waste(shard_batch(prompts, responses, ranks=1, microbatching=Dynamic(budget)), prompts, responses)
    assert ours < 0.9 * (1 - (sum(prompts) + sum(responses)) / padded)


def test_waste_and_balance_by_hand():
    prompts, responses = [2, 4, 2, 4], [3, 1, 6, 8]  # 5, 5, 8, 12 tokens
    shards = shard_batch(prompts, responses, ranks=2, microbatching=Plain(1))
    assert [shard.index for shard in shards] == [(0, 3), (1, 2)] or [shard.index for shard in shards] == [
        (1, 3),
        (0, 2),
    ]
    assert waste(shards, prompts, responses) == pytest.approx(1 - 30 / (4 * 12))
    assert balance(shards, prompts, responses) == 1, "every pass computes 12 tokens"
    (one,) = shard_batch(prompts, responses, ranks=1, microbatching=Plain(3))
    assert waste([one], prompts, responses) == pytest.approx(1 - 30 / (4 * 12))
    packed = shard_batch(prompts, responses, ranks=1, microbatching=Packed(20))
    assert waste(packed, prompts, responses) == 0
    assert [len(m.samples) for m in packed[0].updates[0].microbatches] in ([2, 2], [1, 3])
    halves = shard_batch([0] * 4, [1, 3, 4, 4], ranks=2, microbatching=Packed(4), minibatches=2)
    assert balance(halves, [0] * 4, [1, 3, 4, 4]) == pytest.approx((3 + 4) / (2 + 4))
    squares = shard_batch([0] * 4, [1, 3, 4, 4], ranks=2, microbatching=Packed(4), minibatches=2, quadratic=2.0)
    assert balance(squares, [0] * 4, [1, 3, 4, 4], 2.0) == pytest.approx((21 + 36) / (12 + 36))
    uneven = shard_batch([0] * 3, [4, 4, 4], ranks=2, microbatching=Dynamic(8))
    assert balance(uneven, [0] * 3, [4, 4, 4]) == pytest.approx(8 / 6)
    assert [(s.padding, s.imbalance) for s in uneven] == [(0.0, pytest.approx(8 / 6))] * 2
    alone = shard_batch([0] * 4, [10, 2, 2, 2], ranks=2, microbatching=Dynamic(10), equal=False, quadratic=1.0)
    assert [s.imbalance for s in alone] == [pytest.approx(116 / 64)] * 2, "10 + 2 of one rank, 2 + 2 of the other"
    assert [s.padding for s in shards] == [pytest.approx(1 - 30 / 48)] * 2


def test_first_fit_where_best_fit_needs_a_row_more():
    sizes = [12, 15, 2, 10, 3, 4, 8, 20, 11, 2, 8, 9, 21]
    assert ffd(sizes, 21) == len(rows_within(21, range(13), sizes, sizes)) == 6


def test_levelling_fills_empty_rows_and_leaves_a_single_item_alone():
    rows = _level([[0], [1, 2]], [10, 1, 1], 3)
    assert sorted(map(sorted, rows)) == [[0], [1], [2]]


def test_an_exchange_that_only_moves_a_rounding_error_is_not_made():
    cost = [0.1 + 0.2, 0.3, 5.0, 5.0]
    assert exchanged([[0, 2], [1, 3]], cost, slack=0.0) == [[0, 2], [1, 3]]
    assert [sum(cost[i] for i in share) for share in exchanged([[0, 1], [2, 3]], cost)] == pytest.approx([5.3, 5.3])


def test_shares_take_one_of_each_block():
    rng = random.Random(3)
    costs = sorted((rng.lognormvariate(0, 1) for _ in range(50)), reverse=True)
    shares = spread(range(50), costs, 4)
    assert sorted(i for share in shares for i in share) == list(range(50))
    for share in shares:
        assert [i // 4 for i in share] == list(range(len(share)))
    assert all(a < b for share in shares for a, b in pairwise(share))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"ranks": 0}, "ranks=0 is not 1 or more"),
        ({"minibatches": 4}, "6 samples are not 4 minibatches of equal size"),
        ({"minibatches": 0}, "6 samples are not 0 minibatches"),
        ({"ranks": 4, "minibatches": 2}, "3 samples in a minibatch are fewer than the 4 ranks"),
        ({"prompts": [], "responses": []}, "0 samples in a minibatch are fewer than the 1 ranks"),
        ({"ranks": 4}, "4 ranks do not divide a minibatch of 6 samples"),
        ({"prompts": [1]}, "1 lengths of prompts for 6 of responses"),
        ({"responses": [1, 2, -3, 4, 5, 6]}, "the response at position 2 has a length of -3 tokens"),
        ({"microbatching": Plain(-1)}, "Plain(samples=-1): samples in a microbatch are 0"),
        ({"microbatching": Packed(0)}, "Packed(tokens=0): a budget is 1 token or more"),
        ({"microbatching": Packed(15)}, "the sample at position 4 has 10 + 7 = 17 tokens and does not fit"),
        ({"microbatching": Dynamic(15)}, "Dynamic(tokens=15): the sample at position 4 has 10 + 7 = 17 tokens"),
        ({"microbatching": Packed(17), "ranks": 4, "prompts": [9] * 6, "responses": [8] * 6}, "need a multiple of 4"),
        (
            {"microbatching": Dynamic(17), "ranks": 4, "prompts": [9] * 6, "responses": [8] * 6},
            "4 ranks do not divide 6 samples, and two of 17 tokens, the shortest ones, do not fit together",
        ),
        ({"microbatching": 8}, "8 is not Plain(samples), Dynamic(tokens) or Packed(tokens)"),
        ({"microbatching": Packed(4096.0)}, "4096.0 is not a whole number"),
        ({"quadratic": -1.0}, "quadratic=-1.0 is not a number of 0 or more"),
        ({"quadratic": float("nan")}, "quadratic=nan"),
    ],
)
def test_what_cannot_be_sharded_is_said_with_its_numbers(changes, text):
    arguments = {"prompts": [1, 2, 3, 1, 10, 1], "responses": [5, 6, 3, 9, 7, 1], "ranks": 1, "microbatching": Plain()}
    with pytest.raises(ValueError) as caught:
        shard_batch(**arguments | changes)
    assert text in str(caught.value)


def two_shards(**of_second):
    """Return two ranks with one update of one microbatch each; `of_second` changes the second."""
    different = {"samples": (0,), "prompt": 4, "response": 8, "tokens": 12, "count": 2, "microbatches": 1, "updates": 1}
    different |= of_second
    microbatch = Microbatch(different["samples"], different["prompt"], different["response"])
    update = Update((microbatch,) * different["microbatches"], different["tokens"], different["count"])
    first = Shard(0, 2, (0,), (Update((Microbatch((0,), 4, 8),), 12, 2),), False)
    return [first, Shard(1, 2, (1,), (update,) * different["updates"], False)]


@pytest.mark.parametrize(
    "of_second, text",
    [
        ({"updates": 2}, "ranks 0 and 1 have 1 and 2 updates"),
        ({"microbatches": 3}, "ranks 0 and 1 have 1 and 3 microbatches in update 0"),
        ({"tokens": 11}, "ranks 0 and 1 normalize update 0 by 12 and 11 tokens, 2 and 2 samples"),
        ({"count": 3}, "2 and 3 samples"),
        ({"prompt": 5}, "ranks 0 and 1 pad microbatch 0 of update 0 to 4 + 8 and 5 + 8 tokens"),
        ({"response": 7}, "4 + 8 and 4 + 7 tokens"),
    ],
)
def test_the_preflight_names_the_ranks_that_differ(of_second, text):
    check_equal(two_shards())
    check_equal([])
    with pytest.raises(ValueError) as caught:
        check_equal(two_shards(**of_second))
    assert text in str(caught.value)


def test_ranks_that_pack_alone_are_caught_by_the_preflight():
    prompts, responses = [1] * 8, [60, 60, 60, 60, 40, 35, 30, 25]
    shards = shard_batch(prompts, responses, ranks=2, microbatching=Packed(100), equal=False)
    check_equal(shard_batch(prompts, responses, ranks=2, microbatching=Packed(100)))
    with pytest.raises(ValueError, match="ranks 0 and 1"):
        check_equal(shards)


@pytest.mark.parametrize("mode", [Plain(3), Dynamic(900), Packed(900)])
def test_a_stage_is_sharded_as_its_description_says(mode):
    prompts, responses = lengths("uniform", 24)
    responses = [n // 4 for n in responses]
    described = Sharding.of(mode, minibatches=2, quadratic=1e-3)
    described = msgspec.convert(msgspec.to_builtins(described), Sharding)
    expected = shard_batch(prompts, responses, ranks=3, microbatching=mode, minibatches=2, quadratic=1e-3)
    by_tokens = shard_batch(prompts, responses, ranks=3, microbatching=mode, minibatches=2)
    assert [s.index for s in by_tokens] != [s.index for s in expected]
    assert described.shards({"P": prompts, "T": responses}, 3) == expected


@pytest.mark.parametrize("equal", [True, False])
def test_the_description_of_a_stage_says_whether_its_ranks_meet(equal):
    prompts, responses = [1] * 8, [60, 60, 60, 60, 40, 35, 30, 25]
    described = Sharding.of(Packed(100), equal=equal)
    made = described.shards({"P": prompts, "T": responses}, 2)
    assert made == shard_batch(prompts, responses, ranks=2, microbatching=Packed(100), equal=equal)
    assert made != shard_batch(prompts, responses, ranks=2, microbatching=Packed(100), equal=not equal)


def test_ranks_that_would_not_meet_are_never_handed_out(monkeypatch):
    unequal = two_shards(microbatches=3)
    monkeypatch.setattr("pipeline.declare.sharding.shard_batch", lambda *lengths, **described: unequal)
    with pytest.raises(ValueError, match="ranks 0 and 1 have 1 and 3 microbatches in update 0"):
        Sharding().shards({"P": [4], "T": [8]}, 2)
    assert Sharding(equal=False).shards({"P": [4], "T": [8]}, 2) == unequal
