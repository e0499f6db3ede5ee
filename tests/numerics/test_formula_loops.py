"""The formulas agree with loops in plain Python, also in their gradients; NaN behind the mask never leaks."""

import math

import formula_oracles as oracles
import pytest
import torch

from ops import advantage, kl, logprobs, loss, masks

CHECKS = [
    (oracles.check_advantage, advantage),
    (oracles.check_clipped_loss, loss),
    (oracles.check_aggregate, loss),
    (oracles.check_kl, kl),
    (oracles.check_logprobs, logprobs),
    (oracles.check_masks, masks),
]


@pytest.mark.parametrize(("check", "module"), CHECKS, ids=lambda value: getattr(value, "__name__", None))
def test_agrees_with_loops(check, module):
    check(module)


def test_gradcheck_away_from_the_kinks():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 5, (2, 3))
    assert torch.autograd.gradcheck(lambda x: logprobs.selected_logprobs(x, ids), logits)
    assert torch.autograd.gradcheck(logprobs.entropy, logits)
    lp = (torch.rand(3, 4, dtype=torch.float64) - 2).requires_grad_()
    old = lp.detach() + torch.tensor([0.05, -0.1, 0.6, -0.7], dtype=torch.float64)
    mask = masks.length_mask([4, 2, 0], 4)
    adv = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: loss.clipped_policy_loss(x, old, adv, mask, 0.2, 0.3)[0], lp)
    assert torch.autograd.gradcheck(lambda x: kl.kl_k3(x, old, mask), lp)
    for mode in loss.AGGREGATIONS:
        assert torch.autograd.gradcheck(lambda x, mode=mode: loss.aggregate(x, mask, mode, 3.0), lp)


def test_selected_logprobs_is_bit_equal_to_the_plain_expression():
    torch.manual_seed(1)
    plain = torch.randn(8, 6, 17, requires_grad=True)
    ours = plain.detach().clone().requires_grad_()
    ids, weight = torch.randint(0, 17, (8, 6)), torch.randn(8, 6)
    expected = plain.gather(-1, ids[..., None]).squeeze(-1) - plain.logsumexp(-1)
    actual = logprobs.selected_logprobs(ours, ids)
    (expected * weight).sum().backward()
    (actual * weight).sum().backward()
    assert torch.equal(actual, expected)
    assert torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_rows_do_not_change_the_result(monkeypatch, dtype):
    torch.manual_seed(2)
    logits = torch.randn(3, 5, 11).to(dtype)
    ids = torch.randint(0, 11, (3, 5))

    def run():
        leaf = logits.clone().requires_grad_()
        lp = logprobs.selected_logprobs(leaf, ids)
        lp.sum().backward()
        return lp.detach(), leaf.grad, logprobs.entropy(logits)

    whole = run()
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 30)
    for one, many in zip(whole, run()):
        torch.testing.assert_close(one, many, rtol=1e-6, atol=1e-6)


def test_half_precision_is_reduced_in_float32():
    logits = torch.full((1, 1, 4096), 1.0, dtype=torch.bfloat16)
    ids = torch.zeros(1, 1, dtype=torch.long)
    lp, h = logprobs.selected_logprobs(logits, ids), logprobs.entropy(logits)
    assert lp.dtype == h.dtype == torch.float32
    assert lp.item() == pytest.approx(-math.log(4096), abs=1e-5)
    assert h.item() == pytest.approx(math.log(4096), abs=1e-5)


def test_entropy_with_tokens_ruled_out():
    logits = torch.tensor([[[0.0, -math.inf, 0.0], [5.0, -math.inf, -math.inf]]], requires_grad=True)
    h = logprobs.entropy(logits)
    h.sum().backward()
    torch.testing.assert_close(h.detach(), torch.tensor([[math.log(2), 0.0]]))
    assert torch.isfinite(logits.grad).all()


def test_logprobs_are_never_above_zero():
    torch.manual_seed(3)
    logits = torch.randn(64, 8, 3) * 40
    assert (logprobs.selected_logprobs(logits, logits.argmax(-1)) <= 0).all()


def test_gradient_of_a_ratio_that_overflows():
    lp = torch.tensor([[0.0, 0.0]], requires_grad=True)
    old = torch.tensor([[-1e4, -1e4]])
    for adv, expected in ((1.0, -1.2), (0.0, 0.0)):
        out, clipped = loss.clipped_policy_loss(lp, old, torch.tensor([adv]), torch.ones(1, 2), 0.2, 0.2)
        (gradient,) = torch.autograd.grad(out.sum(), lp)
        assert out.tolist() == [[pytest.approx(expected)] * 2]
        assert gradient.tolist() == [[0.0, 0.0]]
        assert clipped.all() == (adv > 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: loss.aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean", 1),
            "'mean' is not one of token, sequence",
        ),
        (lambda: loss.aggregate(torch.zeros(1, 1), torch.ones(1, 1), "token", 0), "normalizer 0 is not above 0"),
        (lambda: loss.clipped_policy_loss(*[torch.zeros(1, 2)] * 4, 0.2, 0.2), "are not three times"),
        (
            lambda: loss.clipped_policy_loss(*[torch.zeros(1, 1)] * 2, torch.zeros(1), torch.ones(1, 1), -1, 0),
            "negative",
        ),
        (lambda: advantage.group_relative(torch.zeros(5), 2), "not whole groups of 2"),
        (lambda: advantage.group_relative(torch.zeros(4), 0), "not whole groups of 0"),
        (lambda: advantage.zero_spread_groups(torch.zeros(4, dtype=torch.int64), 2), "torch.int64"),
        (lambda: masks.length_mask([1, 4], 3), "do not fit in 3"),
        (lambda: logprobs.selected_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 4).long()), "are not"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
