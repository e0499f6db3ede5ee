"""Mamba-2's scan in chunks and its convolution, against one position at a time in float64."""

import pytest
import torch
from torch.nn.functional import conv1d, pad

from ops.state_space import convolved, scanned

SAMPLES = (torch.zeros(37, dtype=torch.long), torch.tensor([0] * 5 + [1] * 9 + [2] + [3] * 22))
PARTS = (slice(0, 5), slice(5, 14), slice(14, 15), slice(15, 37))


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def recurrence(
    x: torch.Tensor, step: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, sample: torch.Tensor
) -> torch.Tensor:
    b, c = (each.repeat_interleave(x.shape[2] // b.shape[2], dim=2) for each in (b, c))
    state = x.new_zeros(len(x), *x.shape[2:], b.shape[-1])
    made = []
    for t in range(x.shape[1]):
        if t and sample[t] != sample[t - 1]:
            state = torch.zeros_like(state)
        state = state * (step[:, t] * decay).exp()[..., None, None]
        state = state + (step[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        made.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(made, dim=1)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_chunks_give_the_outputs_and_gradients_of_single_positions(sample: torch.Tensor, chunk: int) -> None:
    given = [
        drawn(2, 37, 4, 3, seed=1),
        3 * drawn(2, 37, 4, seed=2).abs(),
        -5 * drawn(4, seed=3).abs(),
        drawn(2, 37, 2, 5, seed=4),
        drawn(2, 37, 2, 5, seed=5),
    ]
    for each in given:
        each.requires_grad_()
    weight = drawn(2, 37, 4, 3, seed=6)
    made, wanted = scanned(*given, sample, chunk=chunk), recurrence(*given, sample)
    torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-10)
    slopes, wanted_slopes = (torch.autograd.grad((each * weight).sum(), given) for each in (made, wanted))
    torch.testing.assert_close(slopes, wanted_slopes, rtol=1e-9, atol=1e-9)


def test_long_steps_do_not_overflow() -> None:
    """A decay of e^-800 within a chunk: its inverse is no float32."""
    x, b = torch.ones(1, 8, 1, 1, requires_grad=True), torch.ones(1, 8, 1, 1)
    made = scanned(x, torch.full((1, 8, 1), 100.0), -torch.ones(1), b, b, torch.zeros(8), chunk=8)
    torch.testing.assert_close(made, torch.full_like(made, 100.0))
    (slope,) = torch.autograd.grad(made.sum(), x)
    assert slope.isfinite().all()


def test_the_convolution_restarts_at_each_sample() -> None:
    inputs, weight, bias = drawn(2, 37, 6, seed=1), drawn(6, 4, seed=2), drawn(6, seed=3)
    made = convolved(inputs, weight, bias, SAMPLES[1])
    for part in PARTS:
        earlier = pad(inputs[:, part].transpose(1, 2), (3, 0))
        wanted = conv1d(earlier, weight[:, None], bias, groups=6).transpose(1, 2)
        torch.testing.assert_close(made[:, part], wanted)
    torch.testing.assert_close(
        convolved(inputs[:, :2], weight, None, SAMPLES[0][:2])[:, 0], inputs[:, 0] * weight[:, 3]
    )
