"""Checks of `stages.backends.objective`: losses against the loops, whole and split into microbatches.

check_objective(stages.backends.objective)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace

import loops
import pytest
import torch
from cases import DOUBLE, Ragged, near, policies, refuses

from stages.backends import objective
from stages.losses import (
    CispoLoss,
    ClippedLoss,
    Correction,
    Decoupled,
    IcePop,
    PolicyLoss,
    SequenceMask,
    TruncatedIS,
)

SEEDS = (0, 3)
MAX_TOKENS = 9
LOSSES: tuple[PolicyLoss, ...] = (
    ClippedLoss(),
    ClippedLoss(clip=(0.1, 0.5), dual_clip=1.2, aggregation="sequence"),
    ClippedLoss(ratio="sequence", clip=(0.05, 0.1), aggregation="sequence_sum", correction=TruncatedIS(cap=1.2)),
    ClippedLoss(ratio="sequence", dual_clip=1.1, entropy=0.3, aggregation="sequence"),
    ClippedLoss(ratio="sequence", clip=(0.05, 0.1), correction=IcePop(low=0.8, high=1.25), kl=0.5, kl_clamp=0.02),
    ClippedLoss(aggregation="fixed_length", max_tokens=MAX_TOKENS, kl=0.5, correction=IcePop(low=0.8, high=1.25)),
    ClippedLoss(kl=0.5, kl_estimator="k1", kl_importance=True, correction=TruncatedIS(cap=1.1, level="sequence")),
    ClippedLoss(kl=0.5, kl_estimator="k2", entropy=0.2, correction=SequenceMask(low=0.9, high=1.1)),
    ClippedLoss(kl=0.5, kl_importance=True, correction=IcePop(low=0.8, high=1.3, level="sequence")),
    ClippedLoss(correction=Decoupled(), max_tokens=MAX_TOKENS),
    CispoLoss(),
    CispoLoss(clip=(0.1, 0.1), kl=0.5, kl_estimator="k1", kl_clamp=0.1, correction=IcePop(low=0.8, high=1.25)),
    CispoLoss(clip=(0.1, 0.2), kl=0.5, correction=TruncatedIS(cap=1.2), aggregation="sequence", entropy=0.1),
)


@dataclass(frozen=True)
class Batch:
    """One minibatch with the log-probabilities of each policy."""

    case: Ragged
    new: list[list[float]]
    old: list[list[float]]
    rollout: list[list[float]]
    ref: list[list[float]]
    entropies: list[list[float]]
    advantage: list[float]

    @property
    def tokens(self) -> int:
        return sum(self.case.lengths)

    def scored(self, ops: ModuleType, loss: PolicyLoss, rows: slice = slice(None)) -> object:
        """Return the columns, without those that the loss does not need and may lack."""
        tensor, mask = self.case.tensor, self.case.mask[rows]
        return ops.Scored(
            logprobs_NT=tensor(self.new, math.nan)[rows].requires_grad_(),
            old_logprobs_NT=tensor(self.old, math.inf)[rows],
            rollout_logprobs_NT=tensor(self.rollout, math.nan)[rows] if loss.correction is not None else None,
            advantage=torch.tensor(self.advantage, dtype=DOUBLE)[rows],
            mask_NT=mask,
            ref_logprobs_NT=tensor(self.ref, -math.inf)[rows] if loss.kl > 0 else None,
            entropy_NT=tensor(self.entropies, math.nan)[rows].requires_grad_(),
        )


def batch(seed: int, spread: float = 0.4) -> Batch:
    made = policies(seed, spread)
    rng = made.case.rng
    rollout, ref = ([[lp + rng.gauss(0, 0.3) for lp in row] for row in made.old] for _ in range(2))
    entropies = made.case.rows(rng.random)
    return Batch(made.case, made.new, made.old, rollout, ref, entropies, made.advantage)


def weights(loss: PolicyLoss, made: Batch) -> list[loops.Weights]:
    call: Callable[[list[float], list[float]], loops.Weights]
    match loss.correction:
        case None:
            return [([1.0] * len(row), [False] * len(row)) for row in made.new]
        case TruncatedIS(cap=cap, level=level):
            call = lambda prev, rollout: loops.truncated_is(prev, rollout, cap, level)  # noqa: E731
        case IcePop(low=low, high=high, level=level):
            call = lambda prev, rollout: loops.icepop(prev, rollout, low, high, level)  # noqa: E731
        case SequenceMask(low=low, high=high):
            call = lambda prev, rollout: loops.sequence_mask(prev, rollout, low, high)  # noqa: E731
        case _:
            call = loops.decoupled
    return [call(*rows) for rows in zip(made.old, made.rollout)]


def token_losses(loss: PolicyLoss, made: Batch, row: list[float], i: int) -> list[float]:
    """Return the token losses of sample i with log-probabilities `row`; detached values come from the batch."""
    old, advantage = made.old[i], made.advantage[i]
    if isinstance(loss, CispoLoss):
        fixed = [loops.cispo_slope(*pair, advantage, *loss.clip) for pair in zip(made.new[i], old)]
        return [slope * lp for slope, lp in zip(fixed, row)]
    assert isinstance(loss, ClippedLoss)
    ratios = loops.token_ratios(row, old)
    if loss.ratio == "sequence":  # GSPO-token: the response's ratio, with each token's own gradient
        fixed = loops.sequence_ratios(made.new[i], old)
        ratios = [ratio * moved for ratio, moved in zip(fixed, loops.token_ratios(row, made.new[i]))]
    return [loops.clipped(ratio, advantage, *loss.clip, loss.dual_clip) for ratio in ratios]


def penalty(loss: PolicyLoss, lp: float, ref: float) -> float:
    return loops.kl(lp, ref, loss.kl_estimator, loss.kl_clamp)


def penalties(loss: PolicyLoss, made: Batch, row: list[float], i: int) -> list[float]:
    estimates = [penalty(loss, *pair) for pair in zip(row, made.ref[i])]
    factors = [math.exp(lp - fixed) if loss.kl_importance else 1.0 for lp, fixed in zip(row, made.new[i])]
    return [loss.kl * factor * estimate for factor, estimate in zip(factors, estimates)]


def expected(loss: PolicyLoss, made: Batch, new: list[list[float]], entropies: list[list[float]]) -> float:
    return loops.objective(
        new,
        lambda row, i: token_losses(loss, made, row, i),
        [weight for weight, _ in weights(loss, made)],
        loss.aggregation,
        loss.max_tokens,
        lambda row, i: penalties(loss, made, row, i),
        entropies,
        loss.entropy,
    )


def sums(loss: PolicyLoss, made: Batch) -> dict[str, float]:
    """Return the metrics, as sums over tokens."""
    corrected = weights(loss, made)
    pairs = [list(zip(*rows)) for rows in zip(made.new, made.old)]
    if isinstance(loss, CispoLoss):
        ratios = loops.token_ratios
        flags = [
            weight != 0 and loops.is_bounded(*pair, *loss.clip)
            for row, (weights_T, _) in zip(pairs, corrected)
            for pair, weight in zip(row, weights_T)
        ]
    else:
        ratios = (
            loops.sequence_ratios if isinstance(loss, ClippedLoss) and loss.ratio == "sequence" else loops.token_ratios
        )
        flags = [
            loops.is_clipped(ratio, advantage * weight, *loss.clip, loss.dual_clip)
            for new, old, advantage, (row, _) in zip(made.new, made.old, made.advantage, corrected)
            for ratio, weight in zip(ratios(new, old), row)
        ]
    used = [ratio for rows in zip(made.new, made.old) for ratio in ratios(*rows)]
    out = {
        "clip_fraction": float(sum(flags)),
        "clip_high": float(sum(flag and ratio > 1 for flag, ratio in zip(flags, used))),
        "entropy": sum(map(sum, made.entropies)),
        "ratio_mean": sum(used),
        "ratio_max": max(used),
        "loss": expected(loss, made, made.new, made.entropies),
    }
    if loss.correction is not None:
        out["is_weight"] = sum(sum(row) for row, _ in corrected)
        out["is_changed"] = float(sum(sum(row) for _, row in corrected))
    if loss.kl > 0:
        out["kl"] = sum(penalty(loss, *pair) for rows in zip(made.new, made.ref) for pair in zip(*rows))
    return out


def check_objective(ops: ModuleType) -> None:
    check_losses(ops, LOSSES)


def check_formulas(losses: ModuleType) -> None:
    """Check the formulas of the descriptions; `losses` is `stages.losses` or a mutant of it."""
    ops = SimpleNamespace(objective=objective.objective, Scored=losses.Scored)
    check_losses(ops, tuple(twin(loss, losses) for loss in LOSSES))


def twin(made: PolicyLoss | Correction, losses: ModuleType) -> object:
    """Return the same description with that module's formula. It subclasses ours, so that the loops accept it."""
    kind = type(made)
    formula = "policy_loss" if isinstance(made, PolicyLoss) else "weights"
    other = type(kind.__name__, (kind,), {formula: getattr(getattr(losses, kind.__name__), formula)})
    values = {each.name: getattr(made, each.name) for each in fields(made)}
    if values.get("correction") is not None:
        values["correction"] = twin(values["correction"], losses)
    return other(**values)


def check_losses(ops: ModuleType | SimpleNamespace, losses: tuple[PolicyLoss, ...]) -> None:
    for seed in SEEDS:
        made = batch(seed)
        for loss in losses:
            scored = made.scored(ops, loss)
            value, got = ops.objective(loss, scored, tokens=made.tokens, samples=len(made.new))
            value.backward()
            near(value.detach(), expected(loss, made, made.new, made.entropies))
            slope = loops.numeric_gradient(lambda rows, m=made, s=loss: expected(s, m, rows, m.entropies), made.new)
            near(scored.logprobs_NT.grad, made.case.list(slope), 1e-7)
            shares = loops.shares(made.case.lengths, loss.aggregation, loss.max_tokens)
            if loss.entropy:
                rows = [[-loss.entropy * share] * n for share, n in zip(shares, made.case.lengths)]
                near(scored.entropy_NT.grad, made.case.list(rows))
            else:
                assert scored.entropy_NT.grad is None
            want = sums(loss, made)
            assert got == {name: pytest.approx(want[name], rel=1e-11, abs=1e-12) for name in want}, loss


def check_microbatches(ops: ModuleType) -> None:
    """Values and sums of the parts add up to those of the whole; the largest ratio is their maximum."""
    made = batch(1)
    counts = {"tokens": made.tokens, "samples": len(made.new)}
    for loss in LOSSES:
        scored = made.scored(ops, loss)
        value, whole = ops.objective(loss, scored, **counts)
        value.backward()
        parts, slopes = [], []
        for rows in (slice(0, 1), slice(1, 3), slice(3, None)):
            if rows.start < len(made.new):
                part = made.scored(ops, loss, rows)
                number, got = ops.objective(loss, part, **counts)
                number.backward()
                parts.append(got)
                slopes.append(part.logprobs_NT.grad)
        torch.testing.assert_close(torch.cat(slopes), scored.logprobs_NT.grad, rtol=1e-12, atol=1e-14)
        assert ops.MAXIMA == ("ratio_max",) and ops.read([]) == []
        for name, total in whole.items():
            combined = (max if name in ops.MAXIMA else sum)(part[name] for part in parts)
            assert combined == pytest.approx(total, rel=1e-11, abs=1e-12), (loss, name)


def check_objective_input(ops: ModuleType) -> None:
    made = batch(0)
    for loss, column in (
        (ClippedLoss(kl=0.1), "ref_logprobs_NT"),
        (ClippedLoss(correction=TruncatedIS()), "rollout_logprobs_NT"),
        (CispoLoss(entropy=0.1), "entropy_NT"),
    ):
        scored = replace(made.scored(ops, loss), **{column: None})
        refuses(f"needs {column}$", lambda s=scored, x=loss: ops.objective(x, s, tokens=1, samples=1))
    plain = made.scored(ops, ClippedLoss())
    value, got = ops.objective(ClippedLoss(), replace(plain, entropy_NT=None), tokens=1, samples=1)
    assert "entropy" not in got
    # A given reference is measured, but has no effect on a loss without a KL term.
    for reference in (plain.old_logprobs_NT, plain.old_logprobs_NT + 1e4):
        given = replace(plain, ref_logprobs_NT=reference)
        measured, got = ops.objective(ClippedLoss(), given, tokens=1, samples=1)
        assert measured.item() == value.item()
        assert got["kl"] > 0


@dataclass(frozen=True, kw_only=True)
class Halves(Correction):
    """Halves each token's weight through the policy's own logprobs, with meaningless values in padding."""

    says: bool

    def weights(self, scored):
        weight_NT = torch.where(scored.mask_NT, 0.5 * scored.logprobs_NT / scored.logprobs_NT.detach(), 7.0)
        return (weight_NT, torch.ones_like(scored.mask_NT)) if self.says else weight_NT


@dataclass(frozen=True, kw_only=True)
class Plain(PolicyLoss):
    """The policy gradient; with `says`, it reports every token as clipped, including padding."""

    says: bool

    def policy_loss(self, scored, weight_NT):
        loss_NT = -weight_NT * scored.advantage_N[:, None] * scored.logprobs_NT
        return (loss_NT, torch.ones_like(scored.mask_NT)) if self.says else loss_NT


@dataclass(frozen=True, kw_only=True)
class Spread(PolicyLoss):
    """Each token's loss is the sum over its row, padding included, of all that has a gradient."""

    needs_entropy = True

    def policy_loss(self, scored, weight_NT):
        return (scored.logprobs_NT + scored.entropy_NT).sum(-1, keepdim=True).expand_as(weight_NT)


def check_gradient_of_padding(ops: ModuleType) -> None:
    """Whatever a formula does with padding, no gradient reaches it; that of tokens stays."""
    made = batch(0)
    scored = made.scored(ops, Spread())
    plain = replace(scored, entropy_NT=scored.entropy_NT.detach().requires_grad_())
    value, _ = ops.objective(Spread(), plain, tokens=made.tokens, samples=len(made.new))
    value.backward()
    rows = [[len(row) / made.tokens] * len(row) for row in made.new]
    for column in (plain.logprobs_NT, plain.entropy_NT):
        near(column.grad, made.case.list(rows))
        assert not column.grad[~plain.mask_NT].any() and not plain.mask_NT.all()


def check_own_formulas(ops: ModuleType) -> None:
    """A user's weight that has a gradient and values in padding acts as a constant, and as 0 in padding."""
    made = batch(0)
    for says, correction in ((False, None), (True, None), (False, Halves(says=False)), (True, Halves(says=True))):
        loss = Plain(says=says, correction=correction)
        scored = made.scored(ops, loss)
        value, got = ops.objective(loss, scored, tokens=made.tokens, samples=len(made.new))
        value.backward()
        half = 1.0 if correction is None else 0.5
        share = half / made.tokens
        near(value.detach(), -share * sum(a * sum(row) for a, row in zip(made.advantage, made.new)))
        near(scored.logprobs_NT.grad, made.case.list([[-share * a] * len(r) for a, r in zip(made.advantage, made.new)]))
        assert got["clip_fraction"] == (made.tokens if says else 0)
        if correction is not None:
            assert got["is_weight"] == pytest.approx(made.tokens / 2)
            assert got["is_changed"] == (made.tokens if says else 0)


CHECKS = (check_objective, check_microbatches, check_objective_input, check_own_formulas, check_gradient_of_padding)
FORMULAS = (check_formulas,)
