"""The formulas and their gradients agree with loops in plain Python; NaN beyond the mask never leaks."""

import importlib
import math

import checks
import objective_checks
import pytest
import torch

from ops import logprobs
from stages.backends import objective

torch.set_num_threads(1)
CHECKS = [
    *((check, importlib.import_module(name)) for name, group in checks.CHECKS.items() for check in group),
    *((check, objective) for check in objective_checks.CHECKS),
]


@pytest.mark.parametrize(("check", "module"), CHECKS, ids=lambda value: getattr(value, "__name__", None))
def test_agrees_with_loops(check, module):
    check(module)


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
        leaf, other = (logits.clone().requires_grad_() for _ in range(2))
        lp, h = logprobs.selected_logprobs(leaf, ids), logprobs.entropy(other)
        (lp.sum() + h.sum()).backward()
        return lp.detach(), leaf.grad, h.detach(), other.grad

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


def test_logprobs_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="are not"):
        logprobs.selected_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 4).long())
