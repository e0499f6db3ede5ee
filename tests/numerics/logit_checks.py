"""Checks of the functions of logits and lengths: `ops.logprobs`, `ops.masks` and `ops.rewards.length`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import ModuleType

import loops
import pytest
import torch
from cases import CASES, DOUBLE, near, ragged, refuses

# ops.logprobs


def check_logprobs(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng = random.Random(seed)
        samples, tokens, vocabulary = rng.randint(1, 3), rng.randint(1, 4), rng.randint(2, 6)
        logits = [[[rng.gauss(0, 4) for _ in range(vocabulary)] for _ in range(tokens)] for _ in range(samples)]
        ids = [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in range(samples)]
        leaf = torch.tensor(logits, dtype=DOUBLE, requires_grad=True)
        lp = ops.selected_logprobs(leaf, torch.tensor(ids))
        near(lp.detach(), [[loops.log_softmax(row)[i] for row, i in zip(*pair)] for pair in zip(logits, ids)])
        weight = torch.tensor([[rng.gauss(0, 1) for _ in range(tokens)] for _ in range(samples)], dtype=DOUBLE)
        (lp * weight).sum().backward()
        p = torch.tensor([[[math.exp(x) for x in loops.log_softmax(row)] for row in rows] for rows in logits]).double()
        one = torch.nn.functional.one_hot(torch.tensor(ids), vocabulary)
        near(leaf.grad, ((one - p) * weight[..., None]).tolist(), 1e-6)


def check_entropy(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng = random.Random(seed)
        logits = [[rng.gauss(0, 4) for _ in range(4)] for _ in range(3)]
        leaf = torch.tensor([logits], dtype=DOUBLE, requires_grad=True)
        entropy = ops.entropy(leaf)
        near(entropy.detach(), [[loops.entropy(row) for row in logits]])
        entropy.sum().backward()
        slopes = []
        for row in logits:  # dH / d logit_i = -p_i (log p_i + H)
            h = loops.entropy(row)
            slopes.append([-math.exp(lp) * (lp + h) for lp in loops.log_softmax(row)])
        near(leaf.grad, [slopes])
    row = [0.25, -1.5, 2.0]  # large logits in float32 with exact differences
    far = ops.entropy(torch.tensor([row]) + 1e5)
    assert far.item() == pytest.approx(loops.entropy(row), abs=1e-6)


def check_ruled_out(ops: ModuleType) -> None:
    """A logit of -inf is a token of probability 0: it adds nothing to the entropy and gets no gradient."""
    rows = [[0.0, -math.inf, 1.5], [5.0, -math.inf, -math.inf]]
    leaf = torch.tensor([rows], dtype=DOUBLE, requires_grad=True)
    entropy = ops.entropy(leaf)
    near(entropy.detach(), [[loops.entropy([0.0, 1.5]), 0.0]])
    entropy.sum().backward()
    h = loops.entropy([0.0, 1.5])
    first, last = (-math.exp(lp) * (lp + h) for lp in loops.log_softmax([0.0, 1.5]))
    near(leaf.grad, [[[first, 0.0, last], [0.0, 0.0, 0.0]]])


def check_blocks(ops: ModuleType) -> None:
    """Rows are processed in blocks, and the result does not depend on the number of blocks; no rows work too."""
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    ids = torch.tensor([0, 2, 1, 1, 0])
    with pytest.MonkeyPatch.context() as patch:
        for elements in (1, 6, 7, 15, 1 << 20):
            patch.setattr(ops, "_CHUNK_ELEMENTS", elements)
            sizes = [len(logits[rows]) for rows in ops._blocks(logits)]
            assert sizes[0] == min(5, max(1, elements // 3))
            assert sum(sizes) == 5
            _compare_with_autograd(ops, logits, ids)
    none = torch.zeros(2, 0, 3)
    assert ops.selected_logprobs(none, none[..., 0].long()).shape == ops.entropy(none).shape == (2, 0)


def _compare_with_autograd(ops: ModuleType, logits: torch.Tensor, ids: torch.Tensor) -> None:
    leaf, plain = (logits.clone().requires_grad_() for _ in range(2))
    lp, entropy = ops.selected_logprobs(leaf, ids), ops.entropy(leaf)
    all_lp = plain.log_softmax(-1)
    other_lp, other_entropy = all_lp.gather(-1, ids[:, None])[:, 0], -(all_lp.exp() * all_lp).sum(-1)
    torch.testing.assert_close(lp, other_lp)
    torch.testing.assert_close(entropy, other_entropy)
    (lp.sum() + entropy.sum()).backward()
    (other_lp.sum() + other_entropy.sum()).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def check_half_precision(ops: ModuleType) -> None:
    """Sums are in float32: 4096 equal bfloat16 logits would not add up in bfloat16."""
    for dtype in (torch.bfloat16, torch.float16):
        logits = torch.ones(1, 1, 4096, dtype=dtype, requires_grad=True)
        lp, entropy = ops.selected_logprobs(logits, torch.zeros(1, 1).long()), ops.entropy(logits)
        assert lp.dtype == entropy.dtype == torch.float32
        near(torch.stack([-lp, entropy]).detach().double(), [[[math.log(4096)]]] * 2, 1e-5)
        (entropy.sum() + lp.sum()).backward()
        assert logits.grad.dtype == dtype
        near(logits.grad[0, 0, :2].double(), [1 - 1 / 4096, -1 / 4096], 1e-3)


def check_logprobs_input(ops: ModuleType) -> None:
    for ids in (torch.zeros(2, 4), torch.zeros(2, 3, 4), torch.zeros(2)):
        refuses(r"logits \(2, 3, 4\) and ids", lambda i=ids: ops.selected_logprobs(torch.zeros(2, 3, 4), i.long()))


# ops.rewards.length


def check_overlong(ops: ModuleType) -> None:
    for cache in (1, 4, 10):
        for length in range(14):
            actual = ops.overlong_penalty(length, max_tokens=10, cache=cache)
            assert type(actual) is float
            assert actual == loops.overlong(length, 10, cache)
    for cache in (0, -1, 11):
        refuses("not between 1 and max_tokens, 10", lambda c=cache: ops.overlong_penalty(1, max_tokens=10, cache=c))


# ops.masks


def check_masks(ops: ModuleType) -> None:
    for seed in range(CASES):
        case = ragged(seed)
        rows = case.normal()
        values, mask = case.tensor(rows, math.nan), case.mask
        assert torch.equal(ops.length_mask(case.lengths, case.width), mask)
        near(ops.blank(values, mask), case.list(rows))
        near(ops.masked_sum(values, mask), sum(map(sum, rows)))
        near(ops.masked_sum(values, mask.float(), 1), [sum(row) for row in rows])
        near(ops.masked_mean(values, mask), sum(map(sum, rows)) / sum(case.lengths))
        near(ops.masked_mean(values, mask.long(), 1), [sum(row) / max(1, len(row)) for row in rows])
    refuses("from 1 to 4 do not fit in 3", lambda: ops.length_mask([1, 4], 3))
    refuses("from -1 to 1 do not fit in 3", lambda: ops.length_mask([1, -1], 3))
    assert ops.length_mask([3, 0], 3).tolist() == [[True] * 3, [False] * 3]
    assert ops.length_mask([], 3).shape == (0, 3)


CHECKS: dict[str, tuple[Callable[[ModuleType], None], ...]] = {
    "ops.logprobs": (
        check_logprobs,
        check_entropy,
        check_ruled_out,
        check_blocks,
        check_half_precision,
        check_logprobs_input,
    ),
    "ops.rewards.length": (check_overlong,),
    "ops.masks": (check_masks,),
}
