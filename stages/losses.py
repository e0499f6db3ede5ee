"""Describes the losses that Train minimizes: names, numbers and one formula each; the tensor code is in `ops`.

    Train(policy, on=learner, lr=1e-6, loss=ClippedLoss(clip=(0.2, 0.28), kl=0.001, correction=TruncatedIS(cap=2.0)))

Your own loss is a class with a formula (docs/your-own-loss.md):

    @dataclass(frozen=True, kw_only=True)
    class Reinforce(PolicyLoss):
        def policy_loss(self, scored: Scored, weight_NT):
            return -weight_NT * scored.advantage_N[:, None] * scored.logprobs_NT

A correction is written the same way, with `weights`. Importing this module loads no torch.

GRPO is ClippedLoss(aggregation="sequence"), DAPO's loss ClippedLoss(clip=(0.2, 0.28)), Dr. GRPO's
ClippedLoss(aggregation="fixed_length", max_tokens=...), GSPO ClippedLoss(ratio="sequence", clip=(3e-4, 4e-4),
aggregation="sequence"), decoupled PPO ClippedLoss(correction=Decoupled()).

Symbols: lp = logprobs of the trained policy; prev = those before the step's first update; rollout = those of the
sampler; ref = those of the frozen model; A = advantage; r = exp(lp - prev). All in nat per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeGuard

from pipeline import Field, StageError
from pipeline.declare.parameters import Rule, at_least, broken, one_of, truth
from pipeline.errors import Problem, problems_of, shown
from stages.vocabulary import REF_LOGPROBS

if TYPE_CHECKING:
    import torch

    # A value per token; or that, and which tokens the formula clipped, truncated or rejected.
    Formula = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

AGGREGATIONS = ("token", "sequence", "sequence_sum", "fixed_length")
KL_ESTIMATORS = ("k1", "k2", "k3")
LEVELS = ("token", "sequence")


@dataclass(frozen=True, eq=False)
class Scored:
    """The inputs of a formula. Log-probabilities of the response tokens, in nat, padded to [N, T]: N samples, T tokens
    of the longest response. Padding holds arbitrary values, and a formula's results there are ignored.

    logprobs_NT          of the trained policy, with a gradient
    old_logprobs_NT      of the policy before the step's first update, the denominator of the ratio
    rollout_logprobs_NT  of the sampler; present if the loss has a correction
    advantage            one per sample, [N], or per token, [N, T], as `Train(advantage=)` says; formulas use the next
    advantage_N          one per sample; not there if each token has its own
    advantage_NT         that of each token
    mask_NT              bool, True for tokens that the policy drew
    ref_logprobs_NT      of the frozen model; present if the loss needs a reference
    entropy_NT           of the policy's next token; with a gradient if the loss needs it
    columns              the fields that the loss or its correction `reads`, by name: [N], or padded to [N, T]
    """

    logprobs_NT: torch.Tensor
    old_logprobs_NT: torch.Tensor
    rollout_logprobs_NT: torch.Tensor | None
    advantage: torch.Tensor
    mask_NT: torch.Tensor
    ref_logprobs_NT: torch.Tensor | None = None
    entropy_NT: torch.Tensor | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def advantage_N(self) -> torch.Tensor:  # noqa: N802 - a shape
        """The advantage of each sample. Raises AttributeError if each token has its own."""
        if self.advantage.dim() > 1:
            raise AttributeError("with Train(advantage='token') there is no scored.advantage_N")
        return self.advantage

    @property
    def advantage_NT(self) -> torch.Tensor:  # noqa: N802
        """The advantage of each token: of its sample, or its own."""
        return self.advantage if self.advantage.dim() > 1 else self.advantage[:, None].expand_as(self.mask_NT)

    def trained(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The inputs of a clipped loss: logprobs now and before the update, the advantage, and the mask."""
        return self.logprobs_NT, self.old_logprobs_NT, self.advantage, self.mask_NT

    def sampled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The inputs of a correction: logprobs before the update, those of the sampler, and the mask."""
        assert self.rollout_logprobs_NT is not None  # checked by the objective
        return self.old_logprobs_NT, self.rollout_logprobs_NT, self.mask_NT


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Base class of corrections: weights each token's policy loss, for samples from a policy other than prev.

    reads  additional numeric fields that `weights` needs, in `scored.columns`: reads = (TOKEN_VERSIONS,)
    """

    reads: ClassVar[tuple[Field, ...]] = ()

    def weights(self, scored: Scored) -> Formula:
        """The factor of each token's policy loss, [N, T]; or that, and a bool [N, T], True where it was changed (the
        metric `is_changed`). No gradient flows through it."""
        raise StageError(_no_formula(self, type(self).__name__))

    def problems(self, where: str) -> Iterator[Problem]:
        """Parameters out of range. `where` is the line of the stage."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class TruncatedIS(Correction):
    """Multiplies each token's policy loss by min(w, cap), w = exp(prev - rollout), detached (Yao et al. 2025).

    level  "token": w of the token; "sequence": w of the whole response, the product over its tokens

    TRL calls this token_truncate and sequence_truncate, and also offers a lower bound.
    """

    cap: float = 2.0
    level: Literal["token", "sequence"] = "token"

    def weights(self, scored: Scored) -> Formula:
        """The formula: `ops.correction.truncated_is`."""
        from ops.correction import truncated_is

        return truncated_is(*scored.sampled(), self.cap, self.level)

    def problems(self, where: str) -> Iterator[Problem]:
        """Parameters out of range."""
        yield from _broken(_TRUNCATION, self, where)


@dataclass(frozen=True, kw_only=True)
class IcePop(Correction):
    """Multiplies each token's policy loss by w = exp(prev - rollout) if low <= w <= high, else by 0 (Ring-1T, arXiv
    2510.18855).

    level  "token": w of the token; "sequence": w of the whole response, the product over its tokens

    TRL calls this token_mask and sequence_mask. Rejected tokens still count in the denominator.
    """

    low: float = 0.5
    high: float = 5.0
    level: Literal["token", "sequence"] = "token"

    def weights(self, scored: Scored) -> Formula:
        """The formula: `ops.correction.icepop`."""
        from ops.correction import icepop

        return icepop(*scored.sampled(), self.low, self.high, self.level)

    def problems(self, where: str) -> Iterator[Problem]:
        """Parameters out of range."""
        yield from _bounds(where, self, 0.5, 5.0)
        yield from _broken(_LEVEL, self, where)


@dataclass(frozen=True, kw_only=True)
class SequenceMask(Correction):
    """Multiplies each token's policy loss by its untruncated w = exp(prev - rollout) if the geometric mean of w over
    the response is in [low, high], else by 0. NeMo-RL's seq-mask-tis.

    Rejected responses still count in the denominator.
    """

    low: float
    high: float

    def weights(self, scored: Scored) -> Formula:
        """The formula: `ops.correction.sequence_mask`."""
        from ops.correction import sequence_mask

        return sequence_mask(*scored.sampled(), self.low, self.high)

    def problems(self, where: str) -> Iterator[Problem]:
        """Parameters out of range."""
        yield from _bounds(where, self, 0.999, 1.002)


@dataclass(frozen=True, kw_only=True)
class Decoupled(Correction):
    """Multiplies each token's policy loss by w = exp(prev - rollout), untruncated: decoupled PPO (AReaL, arXiv
    2505.24298), with prev as the proximal and rollout as the behavior policy."""

    def weights(self, scored: Scored) -> Formula:
        """The formula: `ops.correction.decoupled`."""
        from ops.correction import decoupled

        return decoupled(*scored.sampled())


CORRECTIONS = (TruncatedIS, IcePop, SequenceMask, Decoupled)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Base class of losses: aggregate(correction x policy loss + kl x KL estimate - entropy x entropy).

    A loss defines `policy_loss`; the base class does the rest.

    kl             weight of the divergence from the frozen model; 0 needs no RefLogprobs
    kl_estimator   with x = lp - ref: "k1" x, "k2" x^2 / 2, "k3" exp(-x) + x - 1. As a loss, k2 has the gradient of
                   KL(policy || reference) in expectation, k3 that of KL(reference || policy), k1 none at all (arXiv
                   2506.09477, 2510.01555). k3 is GRPO's (arXiv 2402.03300)
    kl_importance  multiply the estimate by exp(lp - stopgrad(lp)), which is 1: then k1 and k3 have the gradient of
                   KL(policy || reference) in expectation, on policy. TRL's use_bias_correction_kl multiplies by r
    kl_clamp       limits each estimate to [-kl_clamp, kl_clamp], without gradient beyond; None is GRPO's form, without
                   a limit. verl 0.9 and NeMo-RL limit k3 to 10
    aggregation    "token": mean over the tokens of the minibatch (DAPO, arXiv 2503.14476); "sequence": mean over
                   samples of their token means (GRPO); "sequence_sum": mean over samples of their token sums;
                   "fixed_length": sum over tokens / (samples x max_tokens) (Dr. GRPO, arXiv 2503.20783; verl's before
                   0.7.1 is not divided by the samples). Counts are those of the whole minibatch, however it is split
    max_tokens     the rollout's maximum response length; "fixed_length" needs it, the others ignore it
    correction     for samples from a policy other than prev: TruncatedIS, IcePop, SequenceMask, Decoupled or your own;
                   it weights the policy loss only. A schedule with max_staleness above 0 needs one
    entropy        weight of the bonus for the exact next-token entropy, aggregated like the loss. Its gradient costs a
                   second tensor of the size of the logits

    A class may also declare what its formula needs:

    reads             additional numeric fields, in `scored.columns`; REF_LOGPROBS is also `scored.ref_logprobs_NT`
    entropy_gradient  whether `scored.entropy_NT` has a gradient; it always has one if `entropy` is above 0
    """

    reads: ClassVar[tuple[Field, ...]] = ()
    entropy_gradient: ClassVar[bool] = False

    kl: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_importance: bool = False
    kl_clamp: float | None = None
    aggregation: Literal["token", "sequence", "sequence_sum", "fixed_length"] = "token"
    max_tokens: int | None = None
    correction: Correction | None = None
    entropy: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads logprobs of the frozen model."""
        return (_number(self.kl) and self.kl > 0) or REF_LOGPROBS in self.columns

    @property
    def needs_entropy(self) -> bool:
        """Whether a gradient flows through the entropy."""
        return self.entropy_gradient or (_number(self.entropy) and self.entropy > 0)

    @property
    def columns(self) -> tuple[Field, ...]:
        """Additional fields that the loss and its correction read, each once; `problems` reports invalid ones."""
        both = (getattr(owner, "reads", ()) for owner in (self, self.correction))
        return tuple(dict.fromkeys(read for reads in both if _are_columns(reads) for read in reads))

    @property
    def corrects_off_policy(self) -> bool:
        """Whether the loss corrects for samples of an older policy."""
        return self.correction is not None

    def log_ratio(self, scored: Scored) -> torch.Tensor:
        """The log of the loss's ratio, [N, T] in nat, for the metrics `ratio_mean`, `ratio_max` and `clip_high`."""
        return scored.logprobs_NT - scored.old_logprobs_NT

    def policy_loss(self, scored: Scored, weight_NT: torch.Tensor) -> Formula:
        """The loss of each token, [N, T]; or that, and a bool [N, T], True where the formula clips (the metric
        `clip_fraction`).

        `weight_NT` is the factor of the correction, 1 if there is none: multiply the advantage by it.
        """
        raise StageError(_no_formula(self, type(self).__name__))

    def problems(self, where: str) -> Iterator[Problem]:
        """Parameters out of range. `where` is the line of the stage."""
        yield from _broken(_LOSS, self, where)
        if self.needs_reference and isinstance(self.kl_importance, bool):
            yield from self._gradient_of_kl(where)
        if self.aggregation == "fixed_length" and self.max_tokens is None:
            yield Problem(
                where=where,
                what=f"{type(self).__name__}(aggregation='fixed_length') without max_tokens",
                why="it divides by the maximum response length",
                fix="max_tokens=512, the rollout's",
            )
        if isinstance(self.correction, Correction):
            yield from _own_problems(self.correction, where)
        elif self.correction is not None:
            yield Problem(
                where=where,
                what=f"{type(self).__name__}(correction={shown(self.correction)})",
                why="a correction is an instance of "
                + ", ".join(kind.__name__ for kind in CORRECTIONS)
                + ", or your own class of Correction",
                fix=f"correction={self.correction.__name__}(...)"
                if _is_class(self.correction, Correction)
                else "correction=TruncatedIS(cap=2.0), or None",
            )

    def _gradient_of_kl(self, where: str) -> Iterator[Problem]:
        """Warnings if the KL term does not pull the policy toward the reference as expected."""
        shown = f"{type(self).__name__}(kl={self.kl}, kl_estimator={self.kl_estimator!r}"
        if self.kl_estimator == "k1" and not self.kl_importance:
            yield Problem(
                where=where,
                what=f"{shown})",
                why="as a loss, k1 has gradient 0 in expectation: it adds noise and no pull",
                fix="kl_importance=True, or kl_estimator='k2', or Advantage(..., kl=...)",
                warning=True,
            )
        if self.kl_estimator == "k2" and self.kl_importance:
            yield Problem(
                where=where,
                what=f"{shown}, kl_importance=True)",
                why="k2 has the gradient of the KL in expectation only without the factor",
                fix="kl_importance=False, or kl_estimator='k3'",
                warning=True,
            )


@dataclass(frozen=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """-min(r A, clip(r, 1 - clip[0], 1 + clip[1]) A): the clipped policy loss (PPO, arXiv 1707.06347).

    clip       how far the ratio may fall below and rise above 1; (0.2, 0.28) is clip-higher (DAPO, arXiv 2503.14476)
    dual_clip  a number c above 1: for A < 0 the loss is at most -c A (arXiv 1912.09729). None is off, as in TRL, which
               calls it delta; verl's default is 3.0
    ratio      "token": r of the token; "sequence": exp of the mean of lp - prev over the response, with each token's
               gradient through its own lp (GSPO-token, arXiv 2507.18071, eq. 13 and 14)

    The parameters of every loss: see PolicyLoss.
    """

    clip: tuple[float, float] = (0.2, 0.2)
    dual_clip: float | None = None
    ratio: Literal["token", "sequence"] = "token"

    def policy_loss(self, scored: Scored, weight_NT: torch.Tensor) -> Formula:
        """The formula: `ops.loss.clipped_policy_loss`."""
        from ops.loss import clipped_policy_loss

        low, high = self.clip
        return clipped_policy_loss(
            *scored.trained(), low, high, dual_clip=self.dual_clip, level=self.ratio, weight_NT=weight_NT
        )

    def log_ratio(self, scored: Scored) -> torch.Tensor:
        """The log of the token's or the response's ratio, as `ratio` says."""
        from ops.loss import log_ratio

        return log_ratio(scored.logprobs_NT, scored.old_logprobs_NT, scored.mask_NT, self.ratio)

    def problems(self, where: str) -> Iterator[Problem]:
        """Parameters out of range."""
        yield from _broken(_CLIPPED, self, where)
        yield from super().problems(where)


@dataclass(frozen=True, kw_only=True)
class CispoLoss(PolicyLoss):
    """-stopgrad(clip(r, 1 - clip[0], 1 + clip[1])) A lp: CISPO (MiniMax-M1, arXiv 2506.13585). No token loses its
    gradient; its weight is bounded.

    clip  how far the ratio may fall below and rise above 1; (None, 4.0) bounds above only, as MiniMax-M1 and TRL do,
          with epsilon_high=5.0

    The parameters of every loss: see PolicyLoss.
    """

    clip: tuple[float | None, float] = (None, 4.0)

    def policy_loss(self, scored: Scored, weight_NT: torch.Tensor) -> Formula:
        """The formula: `ops.loss.cispo_loss`."""
        from ops.loss import cispo_loss

        low, high = self.clip
        return cispo_loss(*scored.trained(), low, high, weight_NT=weight_NT)

    def problems(self, where: str) -> Iterator[Problem]:
        """Parameters out of range."""
        yield from _broken(_CISPO, self, where)
        yield from super().problems(where)


LOSSES = (ClippedLoss, CispoLoss)


def loss_problems(loss: Any, where: str) -> Iterator[Problem]:
    """Problems of a stage's loss, even if it is not a loss description. Runs no formula."""
    if not isinstance(loss, PolicyLoss):
        yield Problem(
            where=where,
            what=f"loss={shown(loss)}",
            why="a loss is an instance of ClippedLoss, CispoLoss, or your own class of PolicyLoss",
            fix=f"loss={loss.__name__ if _is_class(loss, PolicyLoss) else 'ClippedLoss'}()",
        )
        return
    yield from _own_problems(loss, where)
    yield from _formula_problems(loss, where)


def _own_problems(owner: PolicyLoss | Correction, where: str) -> list[Problem]:
    """Problems that a loss or a correction finds in its parameters."""
    kind = type(owner).__name__
    return problems_of(
        owner.problems,
        where,
        says=f"{kind}.problems()",
        where=where,
        why=f"the check of the stage at {where} calls it, and it yields a Problem for each wrong parameter",
        fix=f"correct {kind}.problems()",
    )


def has_own_formula(loss: PolicyLoss) -> bool:
    """Whether the loss or its correction is a user's class."""
    return not (type(loss) in LOSSES and type(loss.correction) in (*CORRECTIONS, type(None)))


def _formula_problems(loss: PolicyLoss, where: str) -> Iterator[Problem]:
    """Check that the loss and its correction have a formula and read numeric fields."""
    if type(loss).policy_loss is PolicyLoss.policy_loss:
        yield _no_formula(loss, where)
    if isinstance(loss.correction, Correction) and type(loss.correction).weights is Correction.weights:
        yield _no_formula(loss.correction, where)
    for owner in (loss, loss.correction):
        reads: Any = getattr(owner, "reads", ())
        if not _are_columns(reads):
            yield Problem(
                where=where,
                what=f"{type(owner).__name__} has reads={shown(reads)}",
                why="a formula reads numbers: a tuple of fields with one value per sample or per response token",
                fix='reads = (Field("difficulty", dtype="float32"),)',
            )


def _is_class(value: object, base: type) -> TypeGuard[type]:
    return isinstance(value, type) and issubclass(value, base) and value is not base


def _are_columns(reads: object) -> bool:
    return isinstance(reads, tuple | list) and all(
        isinstance(read, Field) and read.dtype not in ("str", "weights") and read.dims in ("N", "N T") for read in reads
    )


def _no_formula(owner: PolicyLoss | Correction, where: str) -> Problem:
    name = type(owner).__name__
    if isinstance(owner, PolicyLoss):
        return Problem(
            where=where,
            what=f"{name} has no formula" if type(owner) is not PolicyLoss else "PolicyLoss has no formula of its own",
            why="a loss is a class of PolicyLoss with a method policy_loss",
            fix=f"write def policy_loss(self, scored, weight_NT) in {name}, which returns the loss of each token"
            if type(owner) is not PolicyLoss
            else "loss=ClippedLoss()",
        )
    return Problem(
        where=where,
        what=f"{name} has no formula" if type(owner) is not Correction else "Correction has no formula of its own",
        why="a correction is a class of Correction with a method weights",
        fix=f"write def weights(self, scored) in {name}, which returns the factor of each token"
        if type(owner) is not Correction
        else "correction=TruncatedIS(cap=2.0), or None",
    )


def _broken(rules: Iterable[Rule], owner: object, where: str) -> Iterator[Problem]:
    return broken(rules, owner, where=where, says=f"{type(owner).__name__}({{}})")


def _bounds(where: str, owner: IcePop | SequenceMask, low: float, high: float) -> Iterator[Problem]:
    if not (_pair((owner.low, owner.high)) and 0 <= owner.low <= 1 <= owner.high):
        yield Problem(
            where=where,
            what=f"{type(owner).__name__}(low={shown(owner.low)}, high={shown(owner.high)})",
            why="the bounds are numbers with 0 <= low <= 1 <= high",
            fix=f"low={low}, high={high}",
        )


def _pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(_number(one) for one in value)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _word(name: str, words: tuple[str, ...], fix: str = "token") -> Rule:
    return one_of(name, words, why=f"valid values are {', '.join(words)}", fix=f"{name}={fix!r}")


def _clip(pair: Callable[[Any], bool], inside: Callable[[Any], bool], why: str, bounds: str, fix: object) -> list[Rule]:
    return [
        Rule("clip", pair, f"clip must be two numbers, the distances below and above 1{why}", f"clip={fix}"),
        Rule("clip", lambda clip: not pair(clip) or inside(clip), bounds, f"clip={fix}"),
    ]


def _cispo_pair(clip: Any) -> bool:
    return _pair(clip) or (isinstance(clip, tuple | list) and len(clip) == 2 and clip[0] is None and _number(clip[1]))


_LEVEL = (_word("level", LEVELS),)
_TRUNCATION = (Rule("cap", lambda cap: _number(cap) and cap > 0, "cap must be a number above 0", "cap=2.0"), *_LEVEL)
_CLIPPED = (
    *_clip(
        _pair,
        lambda clip: 0 <= clip[0] < 1 and clip[1] >= 0,
        "",
        "clip[0] is below 1, and neither bound is negative",
        (0.2, 0.2),
    ),
    Rule(
        "dual_clip",
        lambda c: c is None or (_number(c) and c > 1),
        "dual_clip must be a number above 1, or None",
        "dual_clip=3.0",
    ),
    _word("ratio", LEVELS),
)
_CISPO = _clip(
    _cispo_pair,
    lambda clip: 0 <= (clip[0] or 0) <= 1 and clip[1] >= 0,
    "; the first may be None",
    "clip[0] is at most 1, and neither bound is negative",
    (None, 4.0),
)
_LOSS = (
    Rule("kl", lambda kl: _number(kl) and kl >= 0, "the KL weight must be a number, 0 (none) or more", "kl=0.0"),
    _word("kl_estimator", KL_ESTIMATORS, fix="k3"),
    truth("kl_importance", why="it must be True or False", fix=False),
    Rule(
        "kl_clamp",
        lambda c: c is None or (_number(c) and c > 0),
        "kl_clamp must be a number above 0, or None",
        "kl_clamp=10.0",
    ),
    _word("aggregation", AGGREGATIONS),
    at_least("max_tokens", 1, why="the maximum response length must be a whole number, 1 or more", fix=512).optional(),
    Rule(
        "entropy",
        lambda e: _number(e) and e >= 0,
        "the entropy weight must be 0 (none) or more",
        "entropy=0.0",
    ),
)
