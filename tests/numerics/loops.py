"""Every formula of the GRPO family on Python floats, written from the papers and without tensors.

Rows hold the unmasked tokens only: `rows[i][t]` is token t of sample i. Each `*_slope` is the derivative of the value
with respect to the token's log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Row = list[float]
Rows = list[Row]


# Advantages: GRPO 2402.03300 (per sample and per turn), RLOO 2402.14740, Dr. GRPO 2503.20783.


def _groups(rewards: Row, size: int) -> list[Row]:
    return [rewards[first : first + size] for first in range(0, len(rewards), size)]


def group_relative(rewards: Row, size: int, eps: float) -> Row:
    out: Row = []
    for group in _groups(rewards, size):
        if max(group) == min(group):
            out += [0.0] * size
            continue
        mean = sum(group) / size
        variance = sum((reward - mean) ** 2 for reward in group) / (size - 1)
        out += [(reward - mean) / (math.sqrt(variance) + eps) for reward in group]
    return out


def leave_one_out(rewards: Row, size: int) -> Row:
    out: Row = []
    for group in _groups(rewards, size):
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            out.append(reward - sum(others) / len(others) if others else 0.0)
    return out


def mean_centred(rewards: Row, size: int) -> Row:
    return [reward - sum(group) / size for group in _groups(rewards, size) for reward in group]


def turn_relative(turns: Rows, rewards: Row, size: int, discount: float, eps: float) -> Rows:
    """The advantage of each turn: process supervision of GRPO, 2402.03300, section 4.1.3."""
    out: Rows = []
    for first in range(0, len(rewards), size):
        group = [
            [*turns[i][:-1], turns[i][-1] + rewards[i]] for i in range(first, first + size)
        ]  # the sample's reward is that of its last turn
        every = [reward for row in group for reward in row]
        mean = sum(every) / len(every)
        spread = max(every) - min(every)
        variance = sum((reward - mean) ** 2 for reward in every) / (len(every) - 1) if spread else 0.0
        for row in group:
            normal = [(reward - mean) / (math.sqrt(variance) + eps) if spread else 0.0 for reward in row]
            out.append([sum(discount ** (v - u) * normal[v] for v in range(u, len(row))) for u in range(len(row))])
    return out


def of_tokens(advantages: Row, ends: Sequence[int], drawn: Sequence[bool]) -> Row:
    """The advantage of a turn for each token that the policy drew in it."""
    out = [0.0] * len(drawn)
    for t, is_drawn in enumerate(drawn):
        if is_drawn:
            out[t] = advantages[sum(end <= t for end in ends)]
    return out


# Policy losses: PPO 1707.06347, DAPO 2503.14476, dual clip 1912.09729, GSPO 2507.18071, CISPO 2506.13585.


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss


def is_clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> bool:
    """Return whether the loss differs from the unclipped one, and so is constant in the ratio."""
    return advantage != 0 and clipped(ratio, advantage, low, high, dual) != -ratio * advantage


def clipped_slope(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    return 0.0 if is_clipped(ratio, advantage, low, high, dual) else -ratio * advantage


def token_ratios(new: Row, old: Row) -> Row:
    return [math.exp(lp - before) for lp, before in zip(new, old)]


def sequence_ratios(new: Row, old: Row) -> Row:
    """Return the ratio of the whole response to the power of 1 / its length, repeated for each token."""
    product = math.prod(token_ratios(new, old))
    return [product ** (1 / len(new)) for _ in new] if new else []


def cispo(lp: float, old: float, advantage: float, low: float | None, high: float) -> float:
    return cispo_slope(lp, old, advantage, low, high) * lp


def cispo_slope(lp: float, old: float, advantage: float, low: float | None, high: float) -> float:
    ratio = min(math.exp(lp - old), 1 + high)
    return -(ratio if low is None else max(ratio, 1 - low)) * advantage


def is_bounded(lp: float, old: float, low: float | None, high: float) -> bool:
    """Return whether CISPO's weight is one of its bounds."""
    ratio = math.exp(lp - old)
    return ratio > 1 + high or (low is not None and ratio < 1 - low)


# The four ways to aggregate tokens to one number: DAPO 2503.14476, GRPO 2402.03300, Dr. GRPO 2503.20783.


def shares(lengths: Sequence[int], mode: str, max_tokens: int | None = None) -> Row:
    """Return, per sample, the weight of one of its tokens in the loss of the minibatch."""
    samples, tokens = len(lengths), sum(lengths)
    weight: dict[str, Callable[[int], float]] = {
        "token": lambda length: 1 / tokens,
        "sequence": lambda length: 1 / (length * samples),
        "sequence_sum": lambda length: 1 / samples,
        "fixed_length": lambda length: 1 / (samples * max_tokens),
    }
    return [weight[mode](length) if length else 0.0 for length in lengths]


def aggregate(rows: Rows, mode: str, max_tokens: int | None = None) -> float:
    weights = shares([len(row) for row in rows], mode, max_tokens)
    return sum(weight * sum(row) for weight, row in zip(weights, rows))


# KL estimators (Schulman 2020) and their importance factor (2506.09477, 2510.01555).


def kl(lp: float, ref: float, kind: str, clamp: float | None = None) -> float:
    x = lp - ref
    value = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) + x - 1}[kind]
    return value if clamp is None else min(max(value, -clamp), clamp)


def kl_slope(lp: float, ref: float, kind: str, importance: bool = False, clamp: float | None = None) -> float:
    x, value = lp - ref, kl(lp, ref, kind, clamp)
    slope = {"k1": 1.0, "k2": x, "k3": 1 - math.exp(-x)}[kind] if value == kl(lp, ref, kind) else 0.0
    return slope + value if importance else slope


# Corrections: truncated IS (Yao et al. 2025), IcePop 2510.18855, NeMo-RL's seq-mask-tis, decoupled PPO 2505.24298.
# Each returns the weight of every token of one response, and whether it differs from the plain ratio.

Weights = tuple[Row, list[bool]]


def _ratio_of(prev: Row, rollout: Row, level: str) -> Row:
    ratios = token_ratios(prev, rollout)
    return ratios if level == "token" else [math.prod(ratios)] * len(ratios)


def truncated_is(prev: Row, rollout: Row, cap: float, level: str = "token") -> Weights:
    ratios = _ratio_of(prev, rollout, level)
    return [min(w, cap) for w in ratios], [w > cap for w in ratios]


def icepop(prev: Row, rollout: Row, low: float, high: float, level: str = "token") -> Weights:
    ratios = _ratio_of(prev, rollout, level)
    return [w if low <= w <= high else 0.0 for w in ratios], [not low <= w <= high for w in ratios]


def sequence_mask(prev: Row, rollout: Row, low: float, high: float) -> Weights:
    ratios = token_ratios(prev, rollout)
    kept = not ratios or low <= math.prod(ratios) ** (1 / len(ratios)) <= high
    return [w if kept else 0.0 for w in ratios], [not kept] * len(ratios)


def decoupled(prev: Row, rollout: Row) -> Weights:
    return token_ratios(prev, rollout), [False] * len(prev)


# Logits.


def log_softmax(logits: Row) -> Row:
    top = max(logits)
    norm = top + math.log(sum(math.exp(logit - top) for logit in logits))
    return [logit - norm for logit in logits]


def entropy(logits: Row) -> float:
    return -sum(math.exp(lp) * lp for lp in log_softmax(logits) if lp > -math.inf)


# DAPO 2503.14476, eq. 13.


def overlong(length: int, max_tokens: int, cache: int) -> float:
    if length <= max_tokens - cache:
        return 0.0
    if length <= max_tokens:
        return ((max_tokens - cache) - length) / cache
    return -1.0


# The whole loss of a minibatch.


def objective(
    new: Rows,
    policy: Callable[[Row, int], Row],
    weights: Rows,
    mode: str,
    max_tokens: int | None = None,
    penalty: Callable[[Row, int], Row] | None = None,
    entropies: Rows | None = None,
    bonus: float = 0.0,
) -> float:
    """Return the loss. `policy(row, i)` returns the token losses of sample i, `penalty` what is added unweighted."""
    rows = []
    for i, row in enumerate(new):
        losses = [weight * loss for weight, loss in zip(weights[i], policy(row, i))]
        rows.append([a + b for a, b in zip(losses, penalty(row, i))] if penalty else losses)
    total = aggregate(rows, mode, max_tokens)
    return total - bonus * aggregate(entropies, mode, max_tokens) if entropies is not None else total


def numeric_gradient(function: Callable[[Rows], float], rows: Rows, step: float = 1e-6) -> Rows:
    """Return central differences, entry by entry."""

    def moved(i: int, t: int, by: float) -> float:
        return function([[x + by * (i == j and t == u) for u, x in enumerate(row)] for j, row in enumerate(rows)])

    return [
        [(moved(i, t, step) - moved(i, t, -step)) / (2 * step) for t in range(len(row))] for i, row in enumerate(rows)
    ]
