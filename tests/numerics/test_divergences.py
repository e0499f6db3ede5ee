"""Differences between TRL, verl, NeMo-RL and AReaL, and our parameters for each: their formulas as loops.

Written from trl 1.16.0 (trainer/grpo_trainer.py), verl 1dda039 (trainer/ppo/core_algos.py, rollout_corr_helper.py,
workers/utils/losses.py), NeMo-RL 7ea279a (algorithms/loss/loss_functions.py, advantage_estimator.py, utils.py,
reward_functions.py) and AReaL 4aef98d (utils/functional/functional.py).

Not offered, and why it rarely matters:
- the clamps of log-ratios to 20 and of the KL to 10 (verl, NeMo-RL): they act beyond a ratio of 5e8 and a KL of 10 only
- NeMo-RL's leave-one-out baseline together with a division by the standard deviation of the others (its default)
- verl's vectorized GRPO for a group of one, RLOO with the standard deviation, and normalization over the batch (TRL)
- TRL's "bnpo" over several microbatches, verl's "token-sum", and verl's sample count, which omits empty samples
- verl's k3+ (the value of k3 with the gradient of k2: the gradient is kl_estimator="k2"), NeMo-RL's KL weighted with
  pi / pi_rollout, TRL's with pi / pi_prev
- a lower bound of truncated IS (TRL, NeMo-RL); weights normalized to mean 1 (verl); rejection by k2 or k3 (verl, AReaL)
- a rejected token that leaves the denominator (verl's rejection masks)
- overlong without the floor (verl, NeMo-RL), or with another factor, which the weight of the reward replaces
- entropy estimated from the samples (NeMo-RL's metric)
"""

import math

import loops
import pytest
import torch
from cases import near
from objective_checks import MAX_TOKENS, batch

from ops.advantage import group_relative, leave_one_out, mean_centred
from ops.rewards.length import overlong_penalty
from pipeline import StageContext, Task, WorkerGroup
from stages.advantage import Advantage
from stages.backends import objective as ours
from stages.losses import CispoLoss, ClippedLoss, Decoupled, IcePop, SequenceMask, TruncatedIS

torch.set_num_threads(1)
REWARDS = [1.0, 0.0, 0.25, 2.0, 0.5, 0.5, 0.5, 0.5, -1.0, 3.0, 0.0, 0.0]
MADE = batch(98, spread=0.7)


def agrees(loss, theirs, made=MADE):
    """Check that the objective and its gradient equal those of `theirs`, a function of all rows of logprobs."""
    scored = made.scored(ours, loss)
    value, _ = ours.objective(loss, scored, tokens=made.tokens, samples=len(made.new))
    value.backward()
    near(value.detach(), theirs(made.new), 1e-7)  # their denominators add 1e-8
    near(scored.logprobs_NT.grad, made.case.list(loops.numeric_gradient(theirs, made.new)), 1e-7)


def differs(loss, theirs, made=MADE):
    with pytest.raises(AssertionError):
        agrees(loss, theirs, made)


def clamp(x, low, high):
    return min(max(x, low), high)


def by_token(loss_of, **parameters):
    """Return a function from rows of logprobs to rows of losses, given a loss of lp, old and advantage."""

    def rows(new):
        return [
            [loss_of(lp, before, advantage, **parameters) for lp, before in zip(row, old)]
            for row, old, advantage in zip(new, MADE.old, MADE.advantage)
        ]

    return rows


def weighted(rows_of, weights):
    return lambda new: [[w * loss for w, loss in zip(*pair)] for pair in zip(weights, rows_of(new))]


# Aggregations


def verl_agg(rows, mode, scale=None):
    """verl's agg_loss with the global counts that its engines pass."""
    tokens, samples = sum(map(len, rows)), len(rows)
    if mode == "token-mean":
        return sum(map(sum, rows)) / tokens
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / (len(row) + 1e-8) for row in rows) / samples
    total = sum(map(sum, rows)) / samples
    return total / scale if mode == "seq-mean-token-sum-norm" else total


def nemo_agg(rows, token_level):
    """NeMo-RL's masked_mean with global_valid_toks or global_valid_seqs."""
    if token_level:
        return sum(map(sum, rows)) / (sum(map(len, rows)) + 1e-8)
    return sum(sum(row) / (len(row) + 1e-8) for row in rows) / (len(rows) + 1e-8)


def trl_agg(rows, loss_type):
    """TRL's aggregation for one process and one microbatch."""
    tokens, samples = sum(map(len, rows)), len(rows)
    if loss_type == "grpo":
        return sum(sum(row) / max(len(row), 1) for row in rows) / samples
    denominator = {"dapo": tokens, "bnpo": tokens, "dr_grpo": samples * MAX_TOKENS, "luspo": samples}[loss_type]
    return sum(map(sum, rows)) / denominator


FIXED = {"aggregation": "fixed_length", "max_tokens": MAX_TOKENS}


@pytest.mark.parametrize(
    ("parameters", "reduce"),
    [
        ({}, lambda rows: verl_agg(rows, "token-mean")),
        ({"aggregation": "sequence"}, lambda rows: verl_agg(rows, "seq-mean-token-mean")),
        ({"aggregation": "sequence_sum"}, lambda rows: verl_agg(rows, "seq-mean-token-sum")),
        # loss_scale_factor; without it verl uses the width of the padded rows, and before 0.7.1 the mean is a sum.
        (FIXED, lambda rows: verl_agg(rows, "seq-mean-token-sum-norm", MAX_TOKENS)),
        ({}, lambda rows: nemo_agg(rows, token_level=True)),
        ({"aggregation": "sequence"}, lambda rows: nemo_agg(rows, token_level=False)),
        ({"aggregation": "sequence"}, lambda rows: trl_agg(rows, "grpo")),
        ({}, lambda rows: trl_agg(rows, "dapo")),
        (FIXED, lambda rows: trl_agg(rows, "dr_grpo")),
        ({"aggregation": "sequence_sum"}, lambda rows: trl_agg(rows, "luspo")),
    ],
)
def test_aggregation(parameters, reduce):
    rows = by_token(nemo_clipped, low=0.2, high=0.2, c=None)
    agrees(ClippedLoss(**parameters), lambda new: reduce(rows(new)))


# Advantages


def verl_grpo(rewards, size, by_std=True):
    out = []
    for first in range(0, len(rewards), size):
        group = rewards[first : first + size]
        mean, std = (0.0, 1.0) if size == 1 else (sum(group) / size, torch.tensor(group).double().std().item())
        out += [(reward - mean) / (std + 1e-6) if by_std else reward - mean for reward in group]
    return out


def verl_rloo(rewards, size):
    out = []
    for first in range(0, len(rewards), size):
        group = rewards[first : first + size]
        scale = size / (size - 1) if size > 1 else None
        out += [reward * scale - sum(group) / size * scale if scale else reward for reward in group]
    return out


def nemo_grpo(rewards, size, leave_out, normalize):
    out = []
    for first in range(0, len(rewards), size):
        group = rewards[first : first + size]
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :] if leave_out else group
            if size == 1:
                out.append(0.0)  # the baseline is the reward itself
                continue
            n, mean, square = len(others), sum(others) / len(others), sum(x * x for x in others) / len(others)
            std = math.sqrt(max(square - mean * mean, 0.0) * n / (n - 1)) if n > 1 else 0.0
            out.append((reward - mean) / (std + 1e-6) if normalize and std > 0 else reward - mean)
    return out


def trl_grpo(rewards, size, scale="group"):
    out = []
    for first in range(0, len(rewards), size):
        group = rewards[first : first + size]
        mean, std = sum(group) / size, torch.tensor(group).double().std().item() if size > 1 else 0.0
        out += [(reward - mean) / (std + 1e-4) if scale == "group" else reward - mean for reward in group]
    return out


@pytest.mark.parametrize("size", [2, 3, 4])
def test_advantage(size):
    reward = torch.tensor(REWARDS, dtype=torch.float64)
    near(group_relative(reward, size, eps=1e-4), trl_grpo(REWARDS, size))
    near(mean_centred(reward, size), trl_grpo(REWARDS, size, scale="none"))
    near(group_relative(reward, size, eps=1e-6), verl_grpo(REWARDS, size))
    near(mean_centred(reward, size), verl_grpo(REWARDS, size, by_std=False))
    near(leave_one_out(reward, size), verl_rloo(REWARDS, size))
    near(group_relative(reward, size, eps=1e-6), nemo_grpo(REWARDS, size, leave_out=False, normalize=True), 1e-6)
    near(mean_centred(reward, size), nemo_grpo(REWARDS, size, leave_out=False, normalize=False))
    near(leave_one_out(reward, size), nemo_grpo(REWARDS, size, leave_out=True, normalize=False))


def test_both_of_nemo_rls_defaults_together_are_another_formula():
    theirs = nemo_grpo(REWARDS, 4, leave_out=True, normalize=True)
    for formula in (group_relative, leave_one_out, mean_centred):
        actual = formula(torch.tensor(REWARDS, dtype=torch.float64), 4)
        assert (actual - torch.tensor(theirs)).abs().max() > 0.1


def test_a_group_of_one():
    """TRL and NeMo-RL return 0, verl the reward: in its plain RLOO exactly, in GRPO divided by 1 + 1e-6."""
    reward = torch.tensor(REWARDS, dtype=torch.float64)
    for theirs in (nemo_grpo(REWARDS, 1, True, True), trl_grpo(REWARDS, 1)):
        for formula in (group_relative, leave_one_out, mean_centred):
            near(formula(reward, 1), theirs)
    context = StageContext(group=WorkerGroup("host"), rank=0, seed=0, group_size=1, run_dir=None, shared={})
    run = Advantage("reward").setup(context)
    columns = run({"reward": reward}, Task(stage="advantage", step=0, groups=tuple(range(len(REWARDS))))).columns
    near(columns["advantage"], verl_rloo(REWARDS, 1))
    near(columns["advantage"], verl_grpo(REWARDS, 1, by_std=False))
    near(columns["advantage"], verl_grpo(REWARDS, 1), 2e-6)


# Policy losses


def test_the_batch_reaches_every_bound_that_is_compared():
    """Formulas that differ only at a bound agree on a batch that reaches none."""
    ratios = [
        (ratio, advantage)
        for *rows, advantage in zip(MADE.new, MADE.old, MADE.advantage)
        for ratio in loops.token_ratios(*rows)
    ]
    gains = [ratio for ratio, advantage in ratios if advantage > 0]
    losses = [ratio for ratio, advantage in ratios if advantage < 0]
    assert any(ratio > 1.28 for ratio in gains) and any(1.2 < ratio < 1.28 for ratio in gains)
    assert any(ratio > 3.0 for ratio in losses) and any(1.5 < ratio < 3.0 for ratio in losses)
    assert any(ratio < 0.8 for ratio in losses) and any(ratio < 0.8 for ratio in gains)


def verl_vanilla(lp, old, advantage, low, high, c=3.0):
    ratio = math.exp(clamp(lp - old, -20.0, 20.0))
    bounded = max(-advantage * ratio, -advantage * clamp(ratio, 1 - low, 1 + high))
    return min(-advantage * c, bounded) if advantage < 0 else bounded


def nemo_clipped(lp, old, advantage, low, high, c):
    ratio = math.exp(lp - old)
    bounded = max(-advantage * ratio, -advantage * clamp(ratio, 1 - low, 1 + high))
    return min(bounded, -advantage * c) if advantage < 0 and c is not None else bounded


def trl_clipped(lp, old, advantage, low, high, delta):
    ratio = math.exp(lp - old)
    bounded = clamp(ratio, 1 - low, 1 + high)
    return -min((ratio if delta is None else min(ratio, delta)) * advantage, bounded * advantage)


def areal_clipped(lp, old, advantage, low, high, c):
    ratio = math.exp(lp - old)
    bounded = max(-advantage * ratio, -advantage * clamp(ratio, 1 - low, 1 + high))
    return bounded if c is None else min(bounded, math.copysign(1.0, advantage) * c * advantage)


@pytest.mark.parametrize("theirs", [verl_vanilla, nemo_clipped, trl_clipped, areal_clipped])
def test_clip_and_dual_clip(theirs):
    """On by default in verl with c = 3; off elsewhere. TRL's delta is c if it is at least 1 + the upper clip."""
    for c in (1.5, 3.0):
        named = {"delta": c} if theirs is trl_clipped else {"c": c}
        rows = by_token(theirs, low=0.2, high=0.28, **named)
        agrees(ClippedLoss(clip=(0.2, 0.28), dual_clip=c), lambda new, rows=rows: trl_agg(rows(new), "dapo"))
    off = {"verl_vanilla": {"c": math.inf}, "trl_clipped": {"delta": None}}.get(theirs.__name__, {"c": None})
    rows = by_token(theirs, low=0.2, high=0.28, **off)
    agrees(ClippedLoss(clip=(0.2, 0.28)), lambda new: trl_agg(rows(new), "dapo"))
    differs(ClippedLoss(clip=(0.2, 0.28), dual_clip=1.2), lambda new: trl_agg(rows(new), "dapo"))


def gspo(new, log_ratio_of, low=0.05, high=0.1):
    rows = []
    for i, row in enumerate(new):
        advantage, out = MADE.advantage[i], []
        for t in range(len(row)):
            ratio = math.exp(log_ratio_of(row, i, t))
            out.append(max(-advantage * ratio, -advantage * clamp(ratio, 1 - low, 1 + high)))
        rows.append(out)
    return rows


def test_gspo():
    """TRL and NeMo-RL use the ratio as it is; verl detaches it and routes each token's gradient through its logprob.

    With the mean over the tokens of a response, which verl always uses, both have the same gradient."""

    def plain(row, i, t):
        return sum(lp - old for lp, old in zip(row, MADE.old[i])) / len(row)

    def verl(row, i, t):
        return min(row[t] - MADE.new[i][t] + plain(MADE.new[i], i, t), 10.0)

    loss = ClippedLoss(ratio="sequence", clip=(0.05, 0.1), aggregation="sequence")
    agrees(loss, lambda new: trl_agg(gspo(new, plain), "grpo"))
    agrees(loss, lambda new: nemo_agg(gspo(new, plain), token_level=False))
    agrees(loss, lambda new: verl_agg(gspo(new, verl), "seq-mean-token-mean"))


@pytest.mark.parametrize(
    ("clip", "bounded"),
    [
        ((None, 0.2), lambda ratio: min(ratio, 1.2)),  # TRL, whose epsilon_high is the bound itself
        ((0.1, 0.2), lambda ratio: clamp(ratio, 0.9, 1.2)),  # verl, NeMo-RL
    ],
)
def test_cispo(clip, bounded):
    fixed = [[bounded(ratio) for ratio in loops.token_ratios(*rows)] for rows in zip(MADE.new, MADE.old)]
    rows = weighted(by_token(lambda lp, old, advantage: -advantage * lp), fixed)
    agrees(CispoLoss(clip=clip), lambda new: trl_agg(rows(new), "dapo"))


# The divergence and the entropy


def with_kl(estimate, weight=0.5):
    """Return the clipped loss plus `estimate(lp, ref, fixed)`, where `fixed` is the detached logprob."""
    policy = by_token(nemo_clipped, low=0.2, high=0.2, c=None)

    def total(new):
        penalties = [[estimate(*args) for args in zip(*rows)] for rows in zip(new, MADE.ref, MADE.new)]
        return sum(map(sum, policy(new)), weight * sum(map(sum, penalties))) / MADE.tokens

    return total


def nemo_kl(kind):
    """calculate_kl with kl_importance_weights, which NeMo-RL always applies."""
    return lambda lp, ref, fixed: math.exp(lp - fixed) * clamp(loops.kl(lp, ref, kind), -10.0, 10.0)


def verl_kl(kind):
    return lambda lp, ref, fixed: loops.kl(lp, ref, kind)


def test_kl():
    for kind in ("k1", "k2", "k3"):
        plain, factor = (ClippedLoss(kl=0.5, kl_estimator=kind, kl_importance=on) for on in (False, True))
        agrees(plain, with_kl(verl_kl(kind)))
        agrees(factor, with_kl(nemo_kl(kind)))
        differs(plain, with_kl(nemo_kl(kind)))
    agrees(ClippedLoss(kl=0.5), with_kl(lambda lp, ref, _: math.exp(ref - lp) - (ref - lp) - 1))  # TRL


def test_limit_of_k3():
    """verl and NeMo-RL clamp an estimate at 10; this batch never gets there, so the limit is lower here."""
    rows = with_kl(lambda lp, ref, _: clamp(loops.kl(lp, ref, "k3"), -0.02, 0.02))
    agrees(ClippedLoss(kl=0.5, kl_clamp=0.02), rows)
    differs(ClippedLoss(kl=0.5), rows)


def test_gradient_of_verls_straight_through_k3_is_that_of_k2():
    def k3_plus(lp, ref, fixed):
        return loops.kl(lp, ref, "k2") - loops.kl(fixed, ref, "k2") + loops.kl(fixed, ref, "k3")

    loss = ClippedLoss(kl=0.5, kl_estimator="k2")
    scored = MADE.scored(ours, loss)
    value, _ = ours.objective(loss, scored, tokens=MADE.tokens, samples=len(MADE.new))
    value.backward()
    near(scored.logprobs_NT.grad, MADE.case.list(loops.numeric_gradient(with_kl(k3_plus), MADE.new)), 1e-7)


def test_entropy_bonus():
    """verl aggregates the bonus like the loss, and so do we; TRL always uses the mean over tokens."""
    policy = by_token(nemo_clipped, low=0.2, high=0.2, c=None)
    modes = {"token": "token-mean", "sequence": "seq-mean-token-mean"}
    for aggregation, mode in modes.items():
        bonus = 0.3 * verl_agg(MADE.entropies, mode)
        loss = ClippedLoss(entropy=0.3, aggregation=aggregation)
        agrees(loss, lambda new, m=mode, b=bonus: verl_agg(policy(new), m) - b)
    trl = 0.3 * verl_agg(MADE.entropies, "token-mean")
    agrees(ClippedLoss(entropy=0.3), lambda new: trl_agg(policy(new), "dapo") - trl)
    differs(ClippedLoss(entropy=0.3, aggregation="sequence"), lambda new: trl_agg(policy(new), "grpo") - trl)


# Corrections


def raw(prev, rollout):
    return [math.exp(clamp(a - b, -20.0, 20.0)) for a, b in zip(prev, rollout)]


def whole(prev, rollout):
    total = sum(a - b for a, b in zip(prev, rollout))
    return [math.exp(clamp(total, -20.0, 20.0)) for _ in prev]


def geometric(prev, rollout):
    return math.exp(sum(a - b for a, b in zip(prev, rollout)) / max(len(prev), 1))


CORRECTIONS = {
    # verl compute_rollout_correction_weights
    "verl token": (TruncatedIS(cap=1.2), lambda *rows: [min(w, 1.2) for w in raw(*rows)]),
    "verl sequence": (TruncatedIS(cap=1.2, level="sequence"), lambda *rows: [min(w, 1.2) for w in whole(*rows)]),
    "verl 0.8_1.2": (IcePop(low=0.8, high=1.2), lambda *rows: [w if 0.8 <= w <= 1.2 else 0.0 for w in raw(*rows)]),
    "verl sequence 0.8_1.2": (
        IcePop(low=0.8, high=1.2, level="sequence"),
        lambda *rows: [w if 0.8 <= w <= 1.2 else 0.0 for w in whole(*rows)],
    ),
    # NeMo-RL truncated_importance_sampling_type
    "NeMo-RL tis": (TruncatedIS(cap=1.2), lambda *rows: [clamp(w, 0.0, 1.2) for w in raw(*rows)]),
    "NeMo-RL icepop": (IcePop(low=0.8, high=1.2), lambda *rows: [w * (0.8 <= w <= 1.2) for w in raw(*rows)]),
    "NeMo-RL seq-mask-tis": (
        SequenceMask(low=0.9, high=1.1),
        lambda *rows: [w * (0.9 <= geometric(*rows) <= 1.1) for w in raw(*rows)],
    ),
    "NeMo-RL, not truncated": (Decoupled(), raw),
    # AReaL: decoupled with a cap above which a token leaves the sum, but not the denominator
    "AReaL mask": (IcePop(low=0.0, high=1.2), lambda *rows: [w if w <= 1.2 else 0.0 for w in raw(*rows)]),
    "AReaL clamp": (TruncatedIS(cap=1.2), lambda *rows: [min(w, 1.2) for w in raw(*rows)]),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction(name):
    correction, weights_of = CORRECTIONS[name]
    weights = [weights_of(*rows) for rows in zip(MADE.old, MADE.rollout)]
    rows = weighted(by_token(nemo_clipped, low=0.2, high=0.2, c=None), weights)
    agrees(ClippedLoss(correction=correction), lambda new: trl_agg(rows(new), "dapo"))
    differs(ClippedLoss(), lambda new: trl_agg(rows(new), "dapo"))


def test_trls_sequence_mask_weighs_with_the_whole_response():
    """Ours has the same name, but follows NeMo-RL: it bounds the geometric mean and keeps the tokens' own weights."""
    weights = [[w if 0.5 <= w <= 2.0 else 0.0 for w in whole(*rows)] for rows in zip(MADE.old, MADE.rollout)]
    rows = weighted(by_token(trl_clipped, low=0.2, high=0.2, delta=None), weights)
    agrees(ClippedLoss(correction=IcePop(low=0.5, high=2.0, level="sequence")), lambda new: trl_agg(rows(new), "dapo"))
    differs(ClippedLoss(correction=SequenceMask(low=0.5, high=2.0)), lambda new: trl_agg(rows(new), "dapo"))


# Length


def test_overlong():
    def trl(length, longest, cache):
        if length <= longest - cache:
            return 0.0
        return (longest - cache - length) / cache if length <= longest else -1.0

    def without_floor(length, longest, cache, factor=1.0):  # verl's DAPO reward manager, NeMo-RL
        return min(-(length - (longest - cache)) / cache * factor, 0)

    for length in range(40):
        actual = overlong_penalty(length, max_tokens=20, cache=8)
        assert actual == trl(length, 20, 8) == loops.overlong(length, 20, 8)
        if length <= 20:
            assert actual == without_floor(length, 20, 8)
    assert overlong_penalty(36, max_tokens=20, cache=8) == -1.0 != without_floor(36, 20, 8)
