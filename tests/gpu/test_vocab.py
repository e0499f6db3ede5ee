"""The kernels over the vocabulary on a GPU: logprobs, entropy and their gradient are those of autograd in float64, and
chosen tokens those that a CPU chooses."""

from __future__ import annotations

import pytest
import torch

from ops.kernels import has_kernels
from ops.vocab_parallel import logprobs_and_entropy
from stages.backends.choose import choose
from stages.backends.interface import Sampling


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("size", [1, 7, 4096, 151_936])
def test_they_equal_autograd(size: int, dtype: torch.dtype, error: float, temperature: float, reuse: bool) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    logits = (4 * torch.randn(65, size, generator=random, device="cuda")).to(dtype)
    ids = torch.randint(size, (65,), generator=random, device="cuda")
    by = torch.randn(2, 65, generator=random, device="cuda")
    assert has_kernels(logits)

    exact = logits.double().requires_grad_()
    log = (exact / temperature).log_softmax(-1)
    wanted, spread = log.gather(-1, ids[:, None])[:, 0], -(log.exp() * log).sum(-1)
    (wanted * by[0] + spread * by[1]).sum().backward()

    given = logits.clone().requires_grad_()
    logprobs, entropies = logprobs_and_entropy(given * 1, ids, temperature=temperature, reuse=reuse)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), wanted.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropies.double(), spread.detach(), rtol=1e-5, atol=2e-5)
    (logprobs * by[0] + entropies * by[1]).sum().backward()
    assert exact.grad is not None and given.grad is not None
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=error, atol=error * 1e-1)


def test_an_excluded_token_has_no_probability() -> None:
    logits = torch.zeros(3, 5000, device="cuda")
    logits[:, 100:] = -torch.inf
    logits.requires_grad_()
    logprobs, entropies = logprobs_and_entropy(logits * 1, torch.tensor([0, 99, 100], device="cuda"))
    wanted = torch.tensor(100.0).log().item()
    assert logprobs.tolist() == pytest.approx([-wanted, -wanted, -torch.inf])
    assert entropies.tolist() == pytest.approx([wanted] * 3)
    (logprobs[:2].sum() + entropies.sum()).backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all() and not logits.grad[:, 100:].any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 4096, 151_936])
def test_tokens_are_chosen_as_on_a_cpu(size: int, dtype: torch.dtype, temperature: float) -> None:
    random = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(512, size, generator=random)).to(dtype)
    uniform, how = torch.rand(512, generator=random, dtype=torch.float64), Sampling(1, temperature=temperature)
    wanted, expected = choose(logits, how, uniform)
    tokens, logprobs = (made.cpu() for made in choose(logits.cuda(), how, uniform.cuda()))
    same = tokens == wanted
    assert same.float().mean() > 0.9  # rounding moves boundaries between 150,000 tokens
    torch.testing.assert_close(logprobs[same], expected[same], rtol=1e-5, atol=1e-4)  # the CPU sums in float32
    upto = (logits.double() / temperature).softmax(-1).cumsum(-1)
    rows = torch.arange(512)
    assert (uniform <= upto[rows, tokens] + 1e-5).all()
    assert (uniform >= torch.where(tokens > 0, upto[rows, (tokens - 1).clamp(min=0)], 0.0) - 1e-5).all()
