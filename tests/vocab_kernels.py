"""The vocabulary kernels under Triton's interpreter, on CPU memory: python -m tests.vocab_kernels

Runs in its own process because Triton reads TRITON_INTERPRET on import. Compared with autograd in float64, and with
the choice of tokens on a CPU.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops import vocab_kernel
from ops.vocab_kernel import slopes_, sums
from stages.backends import choose_kernel
from stages.backends.choose import choose
from stages.backends.choose_kernel import choose_whole
from stages.backends.interface import Sampling
from tests.examples import few

vocab_kernel.AT_ONCE = choose_kernel.AT_ONCE = 16


@given(st.data())
@settings(max_examples=few(60), deadline=None)
def same_as_autograd(data: st.DataObject) -> None:
    rows, size = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 70))
    scale = data.draw(st.sampled_from([1.0, 0.5, 2.0]))
    wide = data.draw(st.sampled_from([1.0, 30.0, 1000.0]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, size, generator=random) * wide
    if size > 1 and data.draw(st.booleans()):
        logits[:, torch.randperm(size, generator=random)[: size // 2]] = -torch.inf
    own = torch.randint(-2, size + 2, (rows,), generator=random)
    exact = logits.double().requires_grad_()
    z = exact * scale
    largest, total, expected, chosen = sums(logits, own, scale).double()
    mine = (own >= 0) & (own < size)
    assert torch.allclose(largest, z.detach().amax(-1), rtol=1e-6)
    norm = largest + total.log()
    entropy = total.log() - expected / total
    log = z.log_softmax(-1)
    safe = log.masked_fill(log.isneginf(), 0.0)
    wanted_entropy = -(log.exp() * safe).sum(-1)
    assert torch.allclose(norm, z.logsumexp(-1).detach(), rtol=1e-5, atol=1e-5)
    assert torch.allclose(entropy, wanted_entropy.detach(), rtol=1e-4, atol=1e-4)
    wanted = torch.where(mine, z.gather(-1, own.clamp(0, size - 1)[:, None])[:, 0], 0.0).detach()
    assert torch.equal(chosen.isneginf(), wanted.isneginf())
    assert torch.allclose(chosen, wanted, rtol=1e-5, atol=1e-5)
    by_logprob, by_entropy = torch.randn(2, rows, generator=random)
    picked = torch.where(mine, log.gather(-1, own.clamp(0, size - 1)[:, None])[:, 0], 0.0)
    live = ~wanted.isneginf()
    by_logprob = by_logprob * (mine & live)
    made = slopes_(logits.clone(), own, norm.float(), entropy.float(), by_logprob, by_entropy, scale)
    value = (picked.masked_fill(~(mine & live), 0.0) * by_logprob + wanted_entropy * by_entropy).sum()
    if rows:
        value.backward()
        slope = exact.grad.nan_to_num(0.0)
        assert torch.allclose(made.double(), slope, rtol=2e-3, atol=2e-5 * max(1.0, wide * scale)), (made, slope)


@given(st.data())
@settings(max_examples=few(60), deadline=None)
def chosen_alike(data: st.DataObject) -> None:
    rows, size = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 70))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, size, generator=random) * data.draw(st.sampled_from([0.0, 1.0, 30.0]))
    if size > 1 and data.draw(st.booleans()):
        logits[:, torch.randperm(size, generator=random)[: size // 2]] = -torch.inf
    uniform = torch.rand(rows, generator=random, dtype=torch.float64)
    for edge in data.draw(st.lists(st.sampled_from([1e-300, 0.5, 1.0 - 2**-53]), max_size=rows)):
        uniform[data.draw(st.integers(0, rows - 1))] = edge
    temperature = data.draw(st.sampled_from([1.0, 0.5, 2.0]))
    tokens, logprobs = choose_whole(logits, uniform, temperature)
    wanted, expected = choose(logits, Sampling(1, temperature=temperature), uniform)
    exact = (logits.double() / temperature).softmax(-1).cumsum(-1)
    for row in range(rows):
        for token in (int(tokens[row]), int(wanted[row])):  # which may differ by what rounding takes for 0
            low = exact[row, token - 1] if token else 0.0
            assert logits[row, token] > -torch.inf and low - 1e-6 <= uniform[row] <= exact[row, token] + 1e-6
    both = torch.stack([tokens, wanted])
    same = both[0] == both[1]
    assert torch.allclose(logprobs[same], expected[same], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    same_as_autograd()
    chosen_alike()
