"""`torch.autograd.gradcheck` of every differentiable formula, away from its kinks."""

import pytest
import torch

from ops import kl, logprobs, loss, masks

torch.set_num_threads(1)
MASK = masks.length_mask([4, 2, 0], 4)
ADVANTAGE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def policy():
    """Return logprobs with a gradient, and old ones: ratios of 0.95, 1.1, 0.55 and 2, none of them on a bound."""
    torch.manual_seed(0)
    lp = torch.rand(3, 4, dtype=torch.float64) - 2
    return lp.requires_grad_(), lp.detach() + torch.tensor([0.05, -0.1, 0.6, -0.7], dtype=torch.float64)


def agrees(function, leaf):
    return torch.autograd.gradcheck(function, leaf)


def test_of_logits():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 5, (2, 3))
    assert agrees(lambda x: logprobs.selected_logprobs(x, ids), logits)
    assert agrees(logprobs.entropy, logits)


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_of_the_clipped_loss(dual, weighted):
    lp, old = policy()
    weight = torch.rand(3, 4, dtype=torch.float64) if weighted else None

    def value(x):
        return loss.clipped_policy_loss(x, old, ADVANTAGE, MASK, 0.2, 0.3, dual_clip=dual, weight_NT=weight)[0]

    assert agrees(value, lp)


def test_of_gspo():
    """With equal weights the mean over a response has the gradient of the ratio's own formula (2507.18071, eq. 7)."""
    lp, old = policy()
    ours, clipped = loss.clipped_policy_loss(lp, old, ADVANTAGE, MASK, 0.99, 9.0, level="sequence")
    assert not clipped.any()

    def value(x):
        return -(masks.masked_mean(x - old, MASK, dim=1).exp() * ADVANTAGE).sum()

    assert agrees(value, lp)
    expected = torch.autograd.grad(value(lp), lp)[0]
    torch.testing.assert_close(torch.autograd.grad(masks.masked_mean(ours, MASK, dim=1).sum(), lp)[0], expected)


@pytest.mark.parametrize("low", [None, 0.2])
def test_of_cispo_whose_weight_is_fixed(low):
    """A token's weight depends on the policy too, without a gradient: differences are taken in the factor alone."""
    lp, old = policy()
    value, _ = loss.cispo_loss(lp, old, ADVANTAGE, MASK, low, 0.3)
    slope = value.detach() / lp.detach()
    assert agrees(lambda x: slope * masks.blank(x, MASK), lp)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), lp)[0], slope)


@pytest.mark.parametrize("mode", loss.AGGREGATIONS)
def test_of_the_aggregation(mode):
    lp, _ = policy()
    assert agrees(lambda x: loss.aggregate(x, MASK, mode, 3.0), lp)


@pytest.mark.parametrize("kind", kl.ESTIMATORS)
def test_of_the_kl(kind):
    lp, ref = policy()
    assert agrees(lambda x: kl.kl_estimate(x, ref, MASK, kind), lp)
    # With the factor, the policy of `lp` enters the value without a gradient.
    value = kl.kl_estimate(lp, ref, MASK, kind, importance=True)
    fixed = lp.detach().clone()
    slope = torch.autograd.grad(value.sum(), lp)[0]
    moved = lp.detach().clone().requires_grad_()
    other = (kl.kl_estimate(moved, ref, MASK, kind) * torch.exp(moved - fixed)).sum()
    torch.testing.assert_close(slope, torch.autograd.grad(other, moved)[0])
    assert agrees(lambda x: kl.kl_estimate(x, ref, MASK, kind) * torch.exp(x - fixed), lp)
