"""Rows whose samples share prompts: no sample lost, budgets kept, counts right; plain rows where it does not pay."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.declare.columns import Ragged
from pipeline.declare.lengths import Lengths
from pipeline.declare.sharding import Dynamic, Packed, Plain, Shard, Sharding, balance, check_equal, saved, shard_batch
from tests.examples import few


@st.composite
def batches(draw):
    """Draw arguments of shard_batch: groups of any sizes, some with prompts of several lengths."""
    ranks, minibatches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = draw(st.integers(2, 6))
    groups = [size] * (draw(st.integers(1, 3)) * ranks * minibatches)
    longest = draw(st.sampled_from([3, 40, 700]))
    prompts = [draw(st.integers(0, longest)) for _ in groups for _ in range(size)]
    if draw(st.integers(0, 3)):  # mostly, a group has one prompt
        prompts = [prompts[i // size * size] for i in range(len(prompts))]
    responses = [draw(st.integers(0, longest)) for _ in prompts]
    whole = max(1, *map(sum, zip(prompts, responses)))
    return {
        "prompts": prompts,
        "responses": responses,
        "ranks": ranks,
        "microbatching": Packed(draw(st.integers(whole, 8 * whole + 1))),
        "minibatches": minibatches,
        "quadratic": draw(st.sampled_from([0.0, 0.01])),
        "equal": draw(st.booleans()),
        "groups": groups,
    }


def load(shard, row, arguments):
    """The cost of a row: that of its samples, less that of the prompts it does not compute."""
    at, quadratic = [shard.index[i] for i in row.samples], arguments["quadratic"]
    starts = {0, *accumulate(row.shared)} if row.shared else set(range(len(at)))
    counted = [arguments["prompts"][i] + arguments["responses"][i] for i in at]
    again = [arguments["prompts"][i] for place, i in enumerate(at) if place not in starts]
    return sum(n + quadratic * n * n for n in counted) - sum(n + quadratic * n * n for n in again)


def imbalance(shards, arguments):
    """The cost of the slowest rank over the mean, both summed over updates; 1 without any."""
    slowest = mean = 0.0
    for updates in zip(*(shard.updates for shard in shards)):
        loads = [sum(load(shard, row, arguments) for row in made.microbatches) for shard, made in zip(shards, updates)]
        slowest, mean = slowest + max(loads), mean + sum(loads) / len(loads)
    return slowest / mean if mean else 1.0


@settings(max_examples=few(250), deadline=None)
@given(batches())
def test_every_sample_once_within_the_budget_and_prompts_counted_once(arguments):
    prompts, responses, groups = (arguments[name] for name in ("prompts", "responses", "groups"))
    shards = shard_batch(**arguments)
    assert shard_batch(**arguments) == shards
    assert sorted(i for shard in shards for i in shard.index) == list(range(len(prompts)))
    number = [i for i, size in enumerate(groups) for _ in range(size)]
    computed, run = 0, len(prompts) // arguments["minibatches"]
    for shard in shards:
        assert msgspec.convert(msgspec.to_builtins(shard), Shard) == shard
        for update, made in enumerate(shard.updates):
            assert (made.samples, made.tokens) == (run, sum(responses[update * run : (update + 1) * run]))
            for row in made.microbatches:
                at = [shard.index[i] for i in row.samples]
                assert at and at == sorted(at) and {i // run for i in at} == {update}
                assert row.response >= max(responses[i] for i in at)
                heads = at
                if row.shared:
                    assert sum(row.shared) == len(at) and min(row.shared) > 0
                    starts = [0, *accumulate(row.shared)]
                    heads = [at[start] for start in starts[:-1]]
                    for start, stop in pairwise(starts):
                        assert len({(number[i], prompts[i]) for i in at[start:stop]}) == 1
                tokens = sum(responses[i] for i in at) + sum(prompts[i] for i in heads)
                assert tokens <= arguments["microbatching"].tokens
                computed += tokens
    plain = sum(prompts) + sum(responses)
    assert {shard.shared for shard in shards} == {saved(shards, prompts, responses)}
    assert shards[0].shared == pytest.approx(1 - computed / plain if plain else 0.0)
    assert shards[0].imbalance == balance(shards, prompts, responses, arguments["quadratic"])
    assert shards[0].imbalance == pytest.approx(imbalance(shards, arguments), rel=1e-9)
    if arguments["equal"]:
        check_equal(shards)


@settings(max_examples=few(60), deadline=None)
@given(batches())
def test_shared_rows_are_taken_only_where_the_slowest_rank_takes_less(arguments):
    """A rank's time is the cost of its rows and a sixteenth of a full row for each pass."""

    def slowest(shards, update):
        fixed = arguments["microbatching"].tokens / 16
        return max(
            sum(fixed + load(shard, row, arguments) for row in shard.updates[update].microbatches) for shard in shards
        )

    def rows_of(shards, update):
        return [[[s.index[i] for i in row.samples] for row in s.updates[update].microbatches] for s in shards]

    made, plain = shard_batch(**arguments), shard_batch(**arguments | {"groups": ()})
    for update in range(arguments["minibatches"]):
        if any(row.shared for shard in made for row in shard.updates[update].microbatches):
            assert slowest(made, update) < 0.95 * slowest(plain, update) * (1 + 1e-9)
        else:
            assert rows_of(made, update) == rows_of(plain, update)


def test_the_prompts_of_sixteen_samples_are_computed_once():
    """64 groups of 1,024 + 16 x 256 tokens on eight ranks: a quarter of the tokens, and ranks in balance."""
    prompts, responses = [1024] * 1024, [256] * 1024
    given = {"ranks": 8, "microbatching": Packed(16384), "minibatches": 4, "groups": [16] * 64}
    shards = shard_batch(prompts, responses, **given)
    assert shards[0].shared == pytest.approx(0.75)
    assert shards[0].imbalance == 1.0
    assert {row.shared for shard in shards for update in shard.updates for row in update.microbatches} == {(16, 16)}


def test_rows_of_shared_prompts_cost_every_rank_about_the_same():
    """Groups whose sizes, prompts and responses differ; cost grows with the square of a sample."""
    rng = random.Random(1)
    groups = [rng.randrange(4, 17) for _ in range(64)]
    prompts = [n for size, n in zip(groups, (rng.randrange(200, 4000) for _ in groups)) for _ in range(size)]
    responses = [min(int(rng.lognormvariate(6, 1)), 4000) for _ in prompts]
    given = {"microbatching": Packed(33000), "groups": groups, "quadratic": 3e-5}
    for ranks, most in ((2, 1.005), (4, 1.005), (8, 1.01)):
        shards = shard_batch(prompts, responses, ranks=ranks, **given)
        assert shards[0].shared > 0.4
        assert shards[0].imbalance < most


def test_a_group_that_fills_several_rows_has_its_prompt_in_each():
    (shard,) = shard_batch([100] * 8, [100] * 8, ranks=1, microbatching=Packed(500), groups=[8])
    assert [row.shared for row in shard.updates[0].microbatches] == [(4,), (4,)]
    assert shard.spared([100] * 8) == [100] * 6 and shard.shared == 6 / 16
    shards = shard_batch([100] * 8, [100] * 8, ranks=4, microbatching=Packed(2000), groups=[8])
    assert [[row.shared for row in shard.updates[0].microbatches] for shard in shards] == [[(2,)]] * 4


@pytest.mark.parametrize("tokens", [4096, 8192, 12288, 16384])
def test_where_rows_wait_for_their_launch_sharing_never_makes_more_of_them(tokens):
    """32 groups of 8 samples of 256 + 512 tokens, and 14,650 tokens per launch, as of 0.6B: whole groups fill short
    rows badly."""
    given = {"ranks": 1, "microbatching": Packed(tokens), "minibatches": 4}
    groups = {"groups": [8] * 32}
    ways = {"plain": {}, "counted": groups, "launched": groups | {"floor": 14_650}}
    made = {name: shard_batch([256] * 256, [512] * 256, **given, **more)[0] for name, more in ways.items()}
    rows = {name: sum(len(update.microbatches) for update in shard.updates) for name, shard in made.items()}
    assert made["counted"].shared > 0 and made["launched"].shared > 0
    assert rows["launched"] < rows["plain"] or (tokens == 12288 and rows["launched"] == rows["plain"])
    assert rows["counted"] > rows["plain"] or tokens > 8192


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(
    ("prompt", "groups"),
    [(4, [16] * 8), (1024, ()), (1024, [1] * 128)],
    ids=["short prompts", "unknown groups", "groups of one"],
)
def test_plain_rows_where_nothing_is_gained(prompt, groups, equal):
    rng = random.Random(1)
    responses = [rng.randrange(100, 300) for _ in range(128)]
    given = {"ranks": 4, "microbatching": Packed(4096), "minibatches": 2, "equal": equal}
    made = shard_batch([prompt] * 128, responses, groups=groups, **given)
    assert made == shard_batch([prompt] * 128, responses, **given)
    assert {row.shared for shard in made for update in shard.updates for row in update.microbatches} == {()}


def test_a_stage_shares_in_packed_rows_unless_it_is_told_not_to():
    lengths, groups = {"P": [50] * 8, "T": [5] * 8}, [4, 4]
    for microbatching, shares, fraction in (
        (Packed(200), True, 300 / 440),
        (Packed(200, shared=False), True, 0.0),
        (Packed(200), False, 0.0),
        (Dynamic(200), True, 0.0),
        (Plain(2), True, 0.0),
    ):
        made = Sharding.of(microbatching, shares=shares).shards(lengths, 2, groups)
        assert made[0].shared == fraction, microbatching
    assert repr(Packed(200)) == repr(Packed(200, shared=False)) == "Packed(tokens=200)"


def test_a_worker_with_the_whole_batch_finds_groups_by_their_prompts():
    import torch

    from stages.backends import one_shard

    prompts = Ragged.of([torch.tensor(ids) for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 2, 4])])
    responses = Ragged(torch.zeros(5, dtype=torch.long), (1,) * 5)
    shard = one_shard(prompts, responses, Sharding.of(Packed(30), shares=True))
    assert [row.shared for row in shard.updates[0].microbatches] == [(2, 3)]
    assert one_shard(prompts, responses, Sharding.of(Packed(30))).shared == 0.0


@pytest.mark.parametrize("groups", [[3], [2, 3], [0, 4], [5, -1]])
def test_groups_that_are_not_the_batch_are_refused(groups):
    with pytest.raises(ValueError, match="are not the 4 samples of the batch"):
        Lengths([1] * 4, [1] * 4, groups=groups)
