"""What must stay the same when the input changes: order, shift, scale, padding, the cut into microbatches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.advantage import group_relative, zero_spread_groups
from ops.kl import kl_k3
from ops.loss import AGGREGATIONS, aggregate, clipped_policy_loss
from ops.masks import length_mask

torch.set_num_threads(1)
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, database=None)
SIZES = st.integers(2, 6)
SEEDS = st.integers(0, 2**31)


def group(seed, size, count=3):
    return torch.randn(size * count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(seed, lengths):
    """logprobs, old logprobs, advantage, mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max([*lengths, 1]))
    lp = -torch.rand(shape, generator=generator, dtype=torch.float64)
    old = lp + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return lp, old, torch.randn(len(lengths), generator=generator, dtype=torch.float64), length_mask(lengths, shape[1])


def total(lp, old, advantage, mask, mode, normalizer):
    lp = lp.clone().requires_grad_()
    loss, _ = clipped_policy_loss(lp, old, advantage, mask, 0.2, 0.28)
    value = aggregate(loss + 0.1 * kl_k3(lp, old, mask), mask, mode, normalizer)
    value.backward()
    return value.detach(), lp.grad


@EXAMPLES
@given(SEEDS, SIZES, st.floats(-50, 50), st.floats(0.1, 50))
def test_advantage_ignores_shift_scale_and_order(seed, size, shift, scale):
    reward = group(seed, size)
    expected = group_relative(reward, size, eps=1e-12)
    torch.testing.assert_close(group_relative(reward * scale + shift, size, eps=1e-12), expected, rtol=1e-6, atol=1e-6)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    permuted = reward.reshape(-1, size)[:, order].reshape(-1)
    torch.testing.assert_close(group_relative(permuted, size, 1e-12), expected.reshape(-1, size)[:, order].reshape(-1))


@EXAMPLES
@given(SEEDS, SIZES)
def test_advantage_of_a_group_ignores_other_groups_and_sums_to_zero(seed, size):
    reward = group(seed, size)
    alone = [group_relative(part, size, 1e-12) for part in reward.split(size)]
    torch.testing.assert_close(group_relative(reward, size, 1e-12), torch.cat(alone), rtol=0, atol=0)
    for part in alone:
        assert abs(float(part.sum())) < 1e-9
        assert float(part.std(correction=1)) == pytest.approx(1, abs=1e-6)


@EXAMPLES
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 33))
def test_equal_rewards_teach_exactly_nothing(value, size):
    reward = torch.full((2 * size,), value, dtype=torch.float32)
    assert group_relative(reward, size).tolist() == [0.0] * (2 * size)
    assert zero_spread_groups(reward, size) == 2
    lp = (-torch.rand(2 * size, 3)).requires_grad_()
    loss, _ = clipped_policy_loss(
        lp, lp.detach() + 0.5, group_relative(reward, size), torch.ones(2 * size, 3), 0.2, 0.2
    )
    loss.sum().backward()
    assert not lp.grad.any()


@EXAMPLES
@given(SEEDS, st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 3), st.sampled_from(AGGREGATIONS))
def test_loss_ignores_padding_and_what_lies_in_it(seed, lengths, pad, mode):
    lp, old, advantage, mask = batch(seed, lengths)
    value, gradient = total(lp, old, advantage, mask, mode, 5.0)
    for fill in (math.nan, math.inf, -math.inf, 1e30):
        wide = [torch.nn.functional.pad(x.masked_fill(~mask, fill), (0, pad), value=fill) for x in (lp, old)]
        wide_mask = torch.nn.functional.pad(mask, (0, pad)).to(torch.float32)
        other, other_gradient = total(*wide, advantage, wide_mask, mode, 5.0)
        torch.testing.assert_close(other, value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other_gradient[:, : lp.shape[1]], gradient, rtol=0, atol=0)
        assert not other_gradient[:, lp.shape[1] :].any()


@EXAMPLES
@given(SEEDS, st.lists(st.integers(0, 5), min_size=2, max_size=8), st.integers(1, 4), st.sampled_from(AGGREGATIONS))
def test_loss_ignores_the_cut_into_microbatches(seed, lengths, cut, mode):
    parts = batch(seed, lengths)
    normalizer = float(max(1, sum(lengths)) if mode == "token" else len(lengths))
    value, gradient = total(*parts, mode, normalizer)
    pieces = [total(*piece, mode, normalizer) for piece in zip(*(part.split(cut) for part in parts))]
    torch.testing.assert_close(sum(piece[0] for piece in pieces), value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([piece[1] for piece in pieces]), gradient, rtol=1e-12, atol=1e-12)


@EXAMPLES
@given(SEEDS, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_packed_rows_give_the_same_loss(seed, lengths):
    lp, old, advantage, mask = batch(seed, lengths)
    padded, _ = clipped_policy_loss(lp, old, advantage, mask, 0.2, 0.28)
    token_advantage = advantage.repeat_interleave(torch.tensor(lengths))
    one = torch.ones(sum(lengths), 1)
    packed, _ = clipped_policy_loss(lp[mask][:, None], old[mask][:, None], token_advantage, one, 0.2, 0.28)
    torch.testing.assert_close(packed[:, 0], padded[mask], rtol=0, atol=0)


@EXAMPLES
@given(SEEDS, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_old_policy_itself_has_ratio_one_and_loss_minus_the_mean_advantage(seed, lengths):
    lp, _, advantage, mask = batch(seed, lengths)
    loss, clipped = clipped_policy_loss(lp, lp, advantage, mask, 0.0, 0.0)
    assert not clipped.any()
    torch.testing.assert_close(aggregate(loss, mask, "sequence", len(lengths)), -advantage.mean())
    assert not kl_k3(lp, lp, mask).any()


@EXAMPLES
@given(SEEDS, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_clipping_never_lowers_the_loss(seed, lengths):
    lp, old, advantage, mask = batch(seed, lengths)
    free, _ = clipped_policy_loss(lp, old, advantage, mask, math.inf, math.inf)
    loss, clipped = clipped_policy_loss(lp, old, advantage, mask, 0.1, 0.1)
    assert torch.equal(loss > free, clipped)
    assert torch.equal(loss[~clipped], free[~clipped])
