"""Every formula of `ops` once more, as loops over Python floats written from the papers, and checks against them.

A check takes the module that it judges, so that the same check runs on the real one and on deliberately broken copies.
"""

import math
import random
from types import ModuleType

import torch

torch.set_num_threads(1)

CASES = 12


def group_relative(rewards: list[float], group_size: int, eps: float) -> list[float]:
    out = []
    for first in range(0, len(rewards), group_size):
        group = rewards[first : first + group_size]
        mean = sum(group) / group_size
        if max(group) == min(group):
            out += [0.0] * group_size
            continue
        variance = sum((reward - mean) ** 2 for reward in group) / (group_size - 1)
        out += [(reward - mean) / (math.sqrt(variance) + eps) for reward in group]
    return out


def clipped_loss(lp: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(lp - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def clipped_gradient(lp: float, old: float, advantage: float, low: float, high: float) -> float:
    """d loss / d lp: -r A where the unclipped branch is the smaller one, else 0."""
    ratio = math.exp(lp - old)
    inside = ratio * advantage <= min(max(ratio, 1 - low), 1 + high) * advantage
    return -ratio * advantage if inside else 0.0


def kl_k3(lp: float, ref: float) -> float:
    return math.exp(ref - lp) - (ref - lp) - 1


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    norm = top + math.log(sum(math.exp(logit - top) for logit in logits))
    return [logit - norm for logit in logits]


def entropy(logits: list[float]) -> float:
    return -sum(math.exp(lp) * lp for lp in log_softmax(logits) if lp > -math.inf)


def aggregate(rows: list[list[float]], mode: str, normalizer: float) -> float:
    """`rows` hold the losses of the unmasked tokens only."""
    if mode == "token":
        return sum(sum(row) for row in rows) / normalizer
    return sum(sum(row) / len(row) for row in rows if row) / normalizer


def near(actual: torch.Tensor, expected: list | float, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


def padded(rows: list[list[float]], width: int, fill: float) -> torch.Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


def ragged_case(seed: int) -> tuple[random.Random, list[int], int, torch.Tensor]:
    """Lengths from 0 to the width, one row longer than 0 at least, and their mask."""
    rng = random.Random(seed)
    lengths = [rng.randint(0, 5) for _ in range(rng.randint(1, 4))] + [rng.randint(2, 5)]
    width = max(lengths) + rng.randint(1, 2)
    return rng, lengths, width, torch.tensor([[t < length for t in range(width)] for length in lengths])


def check_advantage(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng = random.Random(seed)
        size, groups = rng.randint(2, 5), rng.randint(1, 4)
        rewards = [rng.choice([0.0, 0.1, 0.5, 1.0, rng.gauss(0, 3)]) for _ in range(size * groups)]
        rewards += [0.1] * size
        for eps in (1e-6, 0.5):
            actual = ops.group_relative(torch.tensor(rewards, dtype=torch.float64), size, eps)
            near(actual, group_relative(rewards, size, eps))
            assert actual[-size:].tolist() == [0.0] * size
        spread = sum(max(rewards[i : i + size]) > min(rewards[i : i + size]) for i in range(0, len(rewards), size))
        assert ops.zero_spread_groups(torch.tensor(rewards), size) == len(rewards) // size - spread
    thirds = torch.full((3,), 0.1, dtype=torch.float32)  # their rounded mean is not 0.1
    assert ops.group_relative(thirds, 3).tolist() == [0.0] * 3
    assert ops.group_relative(torch.tensor([1.0, 2.0]), 1).tolist() == [0.0, 0.0]


def check_clipped_loss(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng, lengths, width, mask = ragged_case(seed)
        old = [[-rng.random() * 3 for _ in range(n)] for n in lengths]
        new = [[lp + rng.gauss(0, 0.4) for lp in row] for row in old]
        advantage = [rng.choice([-1.0, 1.0, 0.0]) * rng.random() * 2 for _ in lengths]
        low, high = 0.2, 0.35
        lp = padded(new, width, math.nan).requires_grad_()
        loss, clipped = ops.clipped_policy_loss(
            lp, padded(old, width, math.inf), torch.tensor(advantage, dtype=torch.float64), mask, low, high
        )
        loss.sum().backward()
        args = [[(n, o, a, low, high) for n, o in zip(*rows)] for *rows, a in zip(new, old, advantage)]
        near(loss.detach(), padded([[clipped_loss(*a) for a in row] for row in args], width, 0.0).tolist())
        gradient = padded([[clipped_gradient(*a) for a in row] for row in args], width, 0.0)
        near(lp.grad, gradient.tolist())
        moving = padded([[float(a[2] != 0) for a in row] for row in args], width, 0.0).bool()
        assert torch.equal(clipped, moving & (gradient == 0))


def check_aggregate(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng, lengths, width, mask = ragged_case(seed)
        rows = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
        for mode, normalizer in (("token", sum(lengths)), ("sequence", len(lengths)), ("token", 7.5)):
            loss = padded(rows, width, math.nan).requires_grad_()
            total = ops.aggregate(loss, mask, mode, normalizer)
            total.backward()
            near(total.detach(), aggregate(rows, mode, normalizer))
            share = [1 if mode == "token" else max(1, len(row)) for row in rows]
            near(
                loss.grad,
                padded([[1 / (n * normalizer)] * len(row) for n, row in zip(share, rows)], width, 0.0).tolist(),
            )


def check_kl(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng, lengths, width, mask = ragged_case(seed)
        ref = [[-rng.random() * 4 for _ in range(n)] for n in lengths]
        new = [[-rng.random() * 4 for _ in range(n)] for n in lengths]
        lp = padded(new, width, math.nan).requires_grad_()
        kl = ops.kl_k3(lp, padded(ref, width, -math.inf), mask)
        kl.sum().backward()
        near(
            kl.detach(), padded([[kl_k3(*pair) for pair in zip(*rows)] for rows in zip(new, ref)], width, 0.0).tolist()
        )
        slope = [[1 - math.exp(r - n) for n, r in zip(*rows)] for rows in zip(new, ref)]
        near(lp.grad, padded(slope, width, 0.0).tolist())


def check_logprobs(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng = random.Random(seed)
        samples, tokens, vocabulary = rng.randint(1, 3), rng.randint(1, 4), rng.randint(2, 6)
        shape = (samples, tokens)
        logits = [[[rng.gauss(0, 4) for _ in range(vocabulary)] for _ in range(tokens)] for _ in range(samples)]
        ids = [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in range(samples)]
        leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        lp = ops.selected_logprobs(leaf, torch.tensor(ids))
        expected = [[log_softmax(row)[i] for row, i in zip(*pair)] for pair in zip(logits, ids)]
        near(lp.detach(), expected)
        assert lp.shape == shape
        weight = torch.tensor([[rng.gauss(0, 1) for _ in range(tokens)] for _ in range(samples)], dtype=torch.float64)
        (lp * weight).sum().backward()
        p = torch.tensor([[[math.exp(x) for x in log_softmax(row)] for row in sample] for sample in logits]).double()
        one = torch.nn.functional.one_hot(torch.tensor(ids), vocabulary)
        near(leaf.grad, ((one - p) * weight[..., None]).tolist(), 1e-6)
        near(ops.entropy(leaf).detach(), [[entropy(row) for row in sample] for sample in logits])
        near(ops.entropy(leaf.detach() + 1e4), [[entropy(row) for row in sample] for sample in logits], 1e-9)


def check_masks(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng, lengths, width, mask = ragged_case(seed)
        rows = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
        values = padded(rows, width, math.nan)
        assert torch.equal(ops.length_mask(lengths, width), mask)
        near(ops.masked_sum(values, mask), sum(map(sum, rows)))
        near(ops.masked_sum(values, mask.float(), 1), [sum(row) for row in rows])
        near(ops.masked_mean(values, mask), sum(map(sum, rows)) / sum(lengths))
        near(ops.masked_mean(values, mask.long(), 1), [sum(row) / max(1, len(row)) for row in rows])
