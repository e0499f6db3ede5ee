"""Invariances under changes of the input: order, shift, scale, padding, packing, the split into microbatches."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from objective_checks import LOSSES

from ops.advantage import group_relative, leave_one_out, mean_centred, turn_relative, zero_spread_groups
from ops.correction import decoupled, icepop, sequence_mask, truncated_is
from ops.kl import ESTIMATORS, kl_estimate, kl_k3
from ops.loss import AGGREGATIONS, LEVELS, aggregate, aggregation_normalizer, cispo_loss, clipped_policy_loss
from ops.masks import length_mask, masked_mean, masked_sum
from stages.backends.objective import MAXIMA, Scored, objective
from stages.losses import ClippedLoss
from tests.examples import few

torch.set_num_threads(1)
EXAMPLES = settings(max_examples=few(40), deadline=None, derandomize=True, database=None)
SIZES = st.integers(2, 6)
SEEDS = st.integers(0, 2**31)
LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)
FILLS = (math.nan, math.inf, -math.inf, 1e30)

ADVANTAGES = {
    "group_relative": lambda reward, size: group_relative(reward, size, eps=1e-12),
    "leave_one_out": leave_one_out,
    "mean_centred": mean_centred,
}
POLICY_LOSSES = {
    "clipped": lambda *given: clipped_policy_loss(*given, 0.2, 0.28),
    "dual clip": lambda *given: clipped_policy_loss(*given, 0.2, 0.28, dual_clip=1.5),
    "GSPO": lambda *given: clipped_policy_loss(*given, 0.02, 0.03, level="sequence"),
    "CISPO": lambda *given: cispo_loss(*given, 0.2, 0.28),
    "CISPO above": lambda *given: cispo_loss(*given, None, 0.28),
}
CORRECTIONS = {
    "truncated": lambda *given: truncated_is(*given, 1.2),
    "truncated sequence": lambda *given: truncated_is(*given, 1.2, "sequence"),
    "icepop": lambda *given: icepop(*given, 0.8, 1.2),
    "icepop sequence": lambda *given: icepop(*given, 0.8, 1.2, "sequence"),
    "sequence mask": lambda *given: sequence_mask(*given, 0.9, 1.1),
    "decoupled": decoupled,
}


def choice(named):
    return st.sampled_from(sorted(named))


def batch(seed, lengths):
    """Return logprobs, old logprobs, advantage and mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max([*lengths, 1]))
    lp = -torch.rand(shape, generator=generator, dtype=torch.float64)
    old = lp + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return lp, old, torch.randn(len(lengths), generator=generator, dtype=torch.float64), length_mask(lengths, shape[1])


def scored(seed, lengths):
    """Return all columns of a minibatch, in the order of the fields of Scored."""
    lp, old, advantage, mask = batch(seed, lengths)
    near = [old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(seed + i)) for i in (1, 2)]
    return [lp, old, near[0], advantage, mask, near[1], -lp]


def run(loss, columns, tokens, samples):
    """Return the value of the objective, its sums, and its gradients in the logprobs and in the entropy."""
    lp, *rest, entropy = columns
    lp, entropy = lp.clone().requires_grad_(), entropy.clone().requires_grad_()
    value, sums = objective(loss, Scored(lp, *rest, entropy), tokens=tokens, samples=samples)
    value.backward()
    return value.detach(), sums, lp.grad, torch.zeros_like(lp) if entropy.grad is None else entropy.grad


def filled(columns, mask, fill, pad=0):
    """Return the columns with `fill` beyond the mask and in `pad` additional columns."""
    out = []
    for column in columns:
        if column is mask:
            column = torch.nn.functional.pad(mask, (0, pad))
        elif column.dim() == 2:
            column = torch.nn.functional.pad(column.masked_fill(~mask, fill), (0, pad), value=fill)
        out.append(column)
    return out


# Advantages


@EXAMPLES
@given(SEEDS, SIZES, st.floats(-50, 50), st.floats(0.1, 50), choice(ADVANTAGES))
def test_advantage_ignores_shift_and_order_and_follows_scale(seed, size, shift, scale, name):
    formula = ADVANTAGES[name]
    reward = torch.randn(size * 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = formula(reward, size)
    scaled = expected if name == "group_relative" else expected * scale
    torch.testing.assert_close(formula(reward * scale + shift, size), scaled, rtol=1e-6, atol=1e-6)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    permuted = formula(reward.reshape(-1, size)[:, order].reshape(-1), size)
    torch.testing.assert_close(permuted, expected.reshape(-1, size)[:, order].reshape(-1))
    torch.testing.assert_close(formula(-reward, size), -expected)


@EXAMPLES
@given(SEEDS, SIZES, choice(ADVANTAGES))
def test_advantage_of_a_group_ignores_other_groups_and_sums_to_zero(seed, size, name):
    reward = torch.randn(size * 3, generator=torch.Generator().manual_seed(seed))
    alone = [ADVANTAGES[name](part, size) for part in reward.split(size)]
    assert torch.equal(ADVANTAGES[name](reward, size), torch.cat(alone))
    assume(all(float(part.std()) > 0.1 for part in reward.split(size)))  # float32 cancels nearly equal rewards
    for part in alone:
        assert abs(float(part.sum())) < 1e-4
        if name == "group_relative":
            assert float(part.std(correction=1)) == pytest.approx(1, abs=1e-4)


def turns_of(seed, samples):
    """Return rewards of one to four turns per sample, and a reward per sample."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 5, (samples,), generator=generator).tolist()
    return [torch.randn(count, generator=generator, dtype=torch.float64) for count in counts], torch.randn(
        samples, generator=generator, dtype=torch.float64
    )


@EXAMPLES
@given(SEEDS, SIZES, st.floats(-50, 50), st.floats(0.1, 50), st.sampled_from([1.0, 0.9, 0.0]))
def test_advantages_of_turns_ignore_shift_scale_order_and_other_groups(seed, size, shift, scale, discount):
    turns, reward = turns_of(seed, size * 3)

    def formula(turns, reward):
        return turn_relative(turns, reward, size, discount, eps=1e-12)

    expected = formula(turns, reward)
    assert all(torch.equal(*pair) for pair in zip(expected[size:], formula(turns[size:], reward[size:]), strict=True))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    for changed, wanted in (
        (formula([each * scale + shift for each in turns], reward * scale), expected),
        (formula([-each for each in turns], -reward), [-each for each in expected]),
        (formula([turns[i] for i in order], reward[order]), [expected[i] for i in order]),
        # the sample's reward is one of its last turn
        (formula([torch.cat([t[:-1], t[-1:] + r]) for t, r in zip(turns, reward)], torch.zeros(size * 3)), expected),
    ):
        for one, other in zip(changed, wanted):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@EXAMPLES
@given(SEEDS, SIZES)
def test_turns_without_discount_add_up_to_the_relative_rewards_from_each_turn_on(seed, size):
    turns, reward = turns_of(seed, size)
    whole, each = (turn_relative(turns, reward, size, discount) for discount in (1.0, 0.0))
    every = torch.cat(each)
    assert abs(float(every.sum())) < 1e-9 and float(every.std(correction=1)) == pytest.approx(1, abs=1e-4)
    for sums, own in zip(whole, each):
        torch.testing.assert_close(sums, own.flip(0).cumsum(0).flip(0))


@EXAMPLES
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 33), choice(ADVANTAGES), choice(POLICY_LOSSES))
def test_equal_rewards_teach_exactly_nothing(value, size, name, loss_name):
    reward = torch.full((2 * size,), value, dtype=torch.float32)
    advantage = ADVANTAGES[name](reward, size)
    assert advantage.tolist() == [0.0] * (2 * size)
    assert zero_spread_groups(reward, size) == 2
    lp = (-torch.rand(2 * size, 3)).requires_grad_()
    loss, _ = POLICY_LOSSES[loss_name](lp, lp.detach() + 0.5, advantage, torch.ones(2 * size, 3))
    loss.sum().backward()
    assert not loss.any()
    assert not lp.grad.any()


# Padding: values beyond the mask affect no value and no gradient


@EXAMPLES
@given(SEEDS, LENGTHS, st.integers(1, 3), choice(POLICY_LOSSES))
def test_policy_loss_ignores_padding(seed, lengths, pad, name):
    lp, old, advantage, mask = batch(seed, lengths)

    def run(lp, old, mask):
        lp = lp.clone().requires_grad_()
        loss, flags = POLICY_LOSSES[name](lp, old, advantage, mask)
        (loss * torch.arange(1, loss.shape[1] + 1)).sum().backward()
        return loss.detach(), lp.grad, flags

    expected = [torch.nn.functional.pad(x, (0, pad)) for x in run(lp, old, mask)]
    for fill in FILLS:
        wide = filled([lp, old, mask], mask, fill, pad)
        for mask_like in (wide[2], wide[2].float()):
            for actual, other in zip(run(*wide[:2], mask_like), expected):
                assert torch.equal(actual, other)


@EXAMPLES
@given(SEEDS, LENGTHS, st.integers(1, 3), st.sampled_from(ESTIMATORS), st.booleans())
def test_kl_ignores_padding(seed, lengths, pad, kind, importance):
    lp, ref, _, mask = batch(seed, lengths)

    def run(lp, ref, mask):
        lp = lp.clone().requires_grad_()
        estimate = kl_estimate(lp, ref, mask, kind, importance)
        estimate.sum().backward()
        return estimate.detach(), lp.grad

    expected = [torch.nn.functional.pad(x, (0, pad)) for x in run(lp, ref, mask)]
    for fill in FILLS:
        for actual, other in zip(run(*filled([lp, ref, mask], mask, fill, pad)), expected):
            assert torch.equal(actual, other)


@EXAMPLES
@given(SEEDS, LENGTHS, st.integers(1, 3), choice(CORRECTIONS))
def test_correction_ignores_padding(seed, lengths, pad, name):
    prev, rollout, _, mask = batch(seed, lengths)
    expected = [torch.nn.functional.pad(x, (0, pad)) for x in CORRECTIONS[name](prev, rollout, mask)]
    for fill in FILLS:
        given_ = filled([prev, rollout, mask], mask, fill, pad)
        for mask_like in (given_[2], given_[2].long()):
            weight, changed = CORRECTIONS[name](*given_[:2], mask_like)
            torch.testing.assert_close(weight, expected[0], rtol=1e-12, atol=0)
            assert torch.equal(changed, expected[1])


@EXAMPLES
@given(SEEDS, LENGTHS, st.integers(1, 3), st.sampled_from(LOSSES))
def test_objective_ignores_padding(seed, lengths, pad, loss):
    columns = scored(seed, lengths)
    value, sums, *gradients = run(loss, columns, sum(lengths), len(lengths))
    for fill in FILLS:
        wide = filled(columns, columns[4], fill, pad)
        other, other_sums, *other_gradients = run(loss, wide, sum(lengths), len(lengths))
        torch.testing.assert_close(other, value, rtol=1e-12, atol=1e-14)
        assert other_sums == pytest.approx(sums, rel=1e-12, abs=1e-12)
        for actual, expected in zip(other_gradients, gradients):
            torch.testing.assert_close(actual, torch.nn.functional.pad(expected, (0, pad)), rtol=1e-12, atol=1e-14)


@EXAMPLES
@given(SEEDS, LENGTHS, st.sampled_from(FILLS))
def test_masked_sums_ignore_what_is_masked(seed, lengths, fill):
    lp, _, _, mask = batch(seed, lengths)
    spoilt = lp.masked_fill(~mask, fill)
    for reduce in (masked_sum, masked_mean):
        for dim in (None, 0, 1):
            leaf = spoilt.clone().requires_grad_()
            total = reduce(leaf, mask, dim)
            total.sum().backward()
            assert torch.equal(total, reduce(lp, mask, dim))
            assert torch.equal(leaf.grad == 0, ~mask)


# Order, packing, and the split into microbatches


@EXAMPLES
@given(SEEDS, LENGTHS, st.integers(1, 4), st.sampled_from(LOSSES))
def test_objective_ignores_the_cut_into_microbatches(seed, lengths, cut, loss):
    columns, counts = scored(seed, lengths), (sum(lengths), len(lengths))
    value, sums, *gradients = run(loss, columns, *counts)
    parts = [run(loss, part, *counts) for part in zip(*(column.split(cut) for column in columns))]
    torch.testing.assert_close(sum(part[0] for part in parts), value, rtol=1e-12, atol=1e-14)
    for name, whole in sums.items():
        combined = (max if name in MAXIMA else sum)(part[1][name] for part in parts)
        assert combined == pytest.approx(whole, rel=1e-12, abs=1e-12)
    for i, expected in enumerate(gradients):
        torch.testing.assert_close(torch.cat([part[2 + i] for part in parts]), expected, rtol=1e-12, atol=1e-14)


@EXAMPLES
@given(SEEDS, LENGTHS, st.sampled_from(LOSSES))
def test_objective_ignores_the_order_of_samples(seed, lengths, loss):
    columns, counts = scored(seed, lengths), (sum(lengths), len(lengths))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    value, sums, *gradients = run(loss, columns, *counts)
    other, other_sums, *others = run(loss, [column[order] for column in columns], *counts)
    torch.testing.assert_close(other, value, rtol=1e-12, atol=1e-14)
    assert other_sums == pytest.approx(sums, rel=1e-12, abs=1e-12)
    for actual, expected in zip(others, gradients):
        torch.testing.assert_close(actual, expected[order], rtol=1e-12, atol=1e-14)


@EXAMPLES
@given(SEEDS, LENGTHS, st.sampled_from(("clipped", "dual clip", "CISPO", "CISPO above")))
def test_packed_rows_give_the_same_loss(seed, lengths, name):
    """Per-token losses are independent of rows: one token per row, in the order of the mask, gives the same numbers."""
    lp, old, advantage, mask = batch(seed, lengths)
    padded, _ = POLICY_LOSSES[name](lp, old, advantage, mask)
    token_advantage = advantage.repeat_interleave(torch.tensor(lengths))
    packed, _ = POLICY_LOSSES[name](lp[mask][:, None], old[mask][:, None], token_advantage, torch.ones(sum(lengths), 1))
    assert torch.equal(packed[:, 0], padded[mask])


@EXAMPLES
@given(SEEDS, LENGTHS, st.sampled_from(AGGREGATIONS), st.floats(0.1, 10))
def test_aggregation_is_linear_and_of_a_constant_is_its_count(seed, lengths, mode, scale):
    loss, other, _, mask = batch(seed, lengths)
    count = aggregation_normalizer(mode, sum(lengths), len(lengths), 7)
    both = aggregate(loss * scale + other, mask, mode, count)
    parts = aggregate(loss, mask, mode, count) * scale + aggregate(other, mask, mode, count)
    torch.testing.assert_close(both, parts)
    samples = len(lengths)
    expected = {
        "token": 1.0,
        "sequence": sum(map(bool, lengths)) / samples,
        "sequence_sum": sum(lengths) / samples,
        "fixed_length": sum(lengths) / samples / 7,
    }
    assert float(aggregate(torch.ones_like(loss), mask, mode, count)) == pytest.approx(expected[mode])


# Relations between the losses


@EXAMPLES
@given(SEEDS, LENGTHS.filter(all), st.sampled_from(LEVELS))
def test_the_old_policy_itself_has_ratio_one_and_loss_minus_the_mean_advantage(seed, lengths, level):
    lp, _, advantage, mask = batch(seed, lengths)
    leaf = lp.clone().requires_grad_()
    loss, clipped = clipped_policy_loss(leaf, lp, advantage, mask, 0.0, 0.0, dual_clip=1.0001, level=level)
    value = aggregate(loss, mask, "sequence", len(lengths))
    value.backward()
    assert not clipped.any()
    torch.testing.assert_close(value.detach(), -advantage.mean())
    share = advantage[:, None] * mask / mask.sum(1, keepdim=True) / len(lengths)
    torch.testing.assert_close(leaf.grad, -share)
    for kind in ESTIMATORS:
        assert not kl_estimate(lp, lp, mask, kind).any()
    assert not kl_k3(lp, lp, mask).any()
    for correction in CORRECTIONS.values():
        weight, changed = correction(lp, lp, mask)
        assert torch.equal(weight, mask.double())
        assert not changed.any()
    columns = [lp, lp, lp, advantage, mask, lp, -lp]
    _, sums, *_ = run(ClippedLoss(aggregation="sequence", kl=0.1, ratio=level), columns, sum(lengths), len(lengths))
    assert sums["ratio_max"] == 1.0
    assert sums["clip_fraction"] == sums["kl"] == 0.0
    assert sums["loss"] == pytest.approx(-float(advantage.mean()))


@EXAMPLES
@given(SEEDS, LENGTHS, st.sampled_from(LEVELS))
def test_clipping_never_lowers_the_loss_and_dual_clip_never_raises_it(seed, lengths, level):
    lp, old, advantage, mask = batch(seed, lengths)
    free, _ = clipped_policy_loss(lp, old, advantage, mask, math.inf, math.inf, level=level)
    loss, clipped = clipped_policy_loss(lp, old, advantage, mask, 0.1, 0.1, level=level)
    assert torch.equal(loss > free, clipped)
    assert torch.equal(loss[~clipped], free[~clipped])
    dual, either = clipped_policy_loss(lp, old, advantage, mask, 0.1, 0.1, dual_clip=1.2, level=level)
    assert torch.equal(dual < loss, either & ~clipped)
    assert torch.equal(dual[~(either & ~clipped)], loss[~(either & ~clipped)])


@EXAMPLES
@given(SEEDS, LENGTHS)
def test_loss_of_sequences_of_one_token_is_that_of_tokens(seed, lengths):
    lp, old, advantage, _ = batch(seed, lengths)
    one = length_mask([min(1, length) for length in lengths], lp.shape[1])
    for dual in (None, 1.3):
        pair = [
            clipped_policy_loss(lp, old, advantage, one, 0.2, 0.2, dual_clip=dual, level=level)[0] for level in LEVELS
        ]
        torch.testing.assert_close(*pair, rtol=1e-14, atol=0)
    for correction in (truncated_is, lambda *a: icepop(*a[:3], 0.9, a[3], a[4])):
        pair = [correction(lp, old, one, 1.1, level)[0] for level in LEVELS]
        torch.testing.assert_close(*pair, rtol=1e-14, atol=0)


@EXAMPLES
@given(SEEDS, LENGTHS, st.floats(1.0, 3.0))
def test_corrections_agree_where_nothing_is_out_of_bounds(seed, lengths, cap):
    prev, rollout, _, mask = batch(seed, lengths)
    raw, _ = decoupled(prev, rollout, mask)
    for weight, changed in (
        truncated_is(prev, rollout, mask, cap),
        icepop(prev, rollout, mask, 1 / cap, cap),
        sequence_mask(prev, rollout, mask, 1 / cap, cap),
    ):
        assert torch.equal(weight[~changed], raw[~changed])
        assert not (changed & ~mask).any()
    weight, changed = truncated_is(prev, rollout, mask, cap)
    assert torch.equal(changed, raw > cap)
    assert (weight[changed] == cap).all()
