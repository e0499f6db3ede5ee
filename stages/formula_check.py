"""Runs the formulas of a user's loss and correction on a few tokens, before a run starts.

    for problem in trial_problems(MyLoss(), "graph.py:12"):
        ...

The first run has two samples of two tokens; the last token is padding. One run repeats it, and one has different and
wider padding. The others have one of the two samples beside other samples: in another order, with another mask and
other columns. A formula must give the same values for the same sample in all of them. This module loads torch;
`--check` loads it only for a user's formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeline import Field
from pipeline.declare.calls import fault
from pipeline.errors import Problem, counted, kind_of, line_of_code, message_of, shown, user_line
from stages.losses import Correction, PolicyLoss, Scored

if TYPE_CHECKING:
    from stages.losses import Formula

_PARAMETERS = {"policy_loss": "scored, weight_NT", "weights": "scored"}


class _Sample(NamedTuple):
    """One sample: values per token, and the last two per sample. `read` and `read_once` are for the fields that a
    formula `reads`."""

    logprobs: tuple[float, ...]
    old: tuple[float, ...]
    rollout: tuple[float, ...]
    ref: tuple[float, ...]
    entropy: tuple[float, ...]
    read: tuple[float, ...]
    advantage: float
    read_once: float


class _Case(NamedTuple):
    """A microbatch: its samples, the padding value, the number of extra columns of padding, and whether each token has
    an advantage of its own."""

    samples: tuple[_Sample, ...]
    padding: float = 0.0
    wide: int = 0
    per_token: bool = False


# fmt: off
FIRST = _Sample((-0.9, -1.5), (-0.9, -1.55), (-0.92, -1.5), (-0.8, -1.4), (0.7, 1.1), (0.5, 1.0), 1.0, 0.5)
SECOND = _Sample((-2.2,), (-2.15,), (-2.1,), (-2.0,), (0.4,), (0.75,), -0.5, 1.0)
LONG = _Sample(
    (-0.3, -3.1, -1.2), (-0.5, -2.9, -1.3), (-0.4, -3.3, -1.35), (-0.2, -2.6, -1.7), (0.2, 1.9, 0.8), (1.5, 0.25, 1.25),
    2.5, 0.3,
)
SHORT = _Sample((-0.65,), (-0.62,), (-0.6,), (-0.9,), (0.3,), (0.3,), 0.4, 0.25)
LAST = _Sample((-2.6,), (-2.3,), (-2.45,), (-2.4,), (1.4,), (1.3,), -1.25, 1.5)
# fmt: on
PAIR = _Case((FIRST, SECOND))
MIXES = (PAIR, _Case((LONG, FIRST, SHORT)), _Case((LAST, SECOND)))  # advantages: one is negative, none, all
CASES = (PAIR, PAIR, _Case(PAIR.samples, padding=-3.0, wide=2), *MIXES[1:])


class _Wrong(Exception):  # noqa: N818 - not an error: it carries a finding of the check
    """What a formula did wrong."""


def trial_problems(loss: PolicyLoss, where: str, *, per_token: bool = False) -> Iterator[Problem]:
    """The first problem of the correction's formula, or else of the loss's. `where` is the stage; `per_token`: tokens
    have advantages of their own."""
    trials: list[tuple[PolicyLoss | Correction, str, Callable[[], None]]] = [
        (loss, "policy_loss", lambda: _try_loss(loss, per_token))
    ]
    if loss.correction is not None:
        trials.insert(0, (loss.correction, "weights", lambda: _try_weights(loss, per_token)))
    problems = (_problem(owner, name, trial, where, loss, per_token) for owner, name, trial in trials)
    yield from islice((problem for problem in problems if problem), 1)


def _problem(
    described: PolicyLoss | Correction,
    name: str,
    trial: Callable[[], None],
    where: str,
    loss: PolicyLoss,
    per_token: bool,
) -> Problem | None:
    formula, owner = getattr(described, name), f"{type(described).__name__}.{name}"
    line = line_of_code(formula) or where
    if mistake := fault(formula, _PARAMETERS[name]):
        return Problem(
            where=line,
            what=f"{owner} {mistake}",
            why="every update calls it with these inputs and uses its result",
            fix=f"write def {name}(self, {_PARAMETERS[name]}), which returns a tensor [N, T]",
        )
    try:
        trial()
    except _Wrong as wrong:
        what, why, fix = wrong.args
        return Problem(where=line, what=f"{owner} {what}", why=why, fix=fix)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code
        return Problem(
            where=user_line(error) or line,
            what=f"{owner} raised {message_of(error)}",
            why="the check runs the formula on microbatches of two and three samples, one to four tokens wide",
            fix="correct the formula; scored has the fields of stages.Scored"
            + _not_declared(formula, loss)
            + _not_widened(formula, error)
            + (", and advantage_NT has that of each token" if per_token and "advantage_N" in _names(formula) else ""),
        )
    return None


def _not_declared(formula: Callable[..., Formula], loss: PolicyLoss) -> str:
    """Say so if a formula uses the frozen model's logprobs, and the loss does not read them."""
    if "ref_logprobs_NT" not in _names(formula) or loss.needs_reference:
        return ""
    return ", and ref_logprobs_NT is None unless the class has reads = (REF_LOGPROBS,), from stages.vocabulary"


def _names(formula: Callable[..., Formula]) -> tuple[str, ...]:
    """The attributes and global names that a formula uses."""
    code = getattr(inspect.unwrap(getattr(formula, "__func__", formula)), "__code__", None)
    return code.co_names if code else ()


def _not_widened(formula: Callable[..., Formula], error: BaseException) -> str:
    """Say how to use a value per sample, if shapes do not match in a formula that has one."""
    if "advantage_N" in _names(formula) and "size of tensor" in str(error):
        return ", and scored.advantage_N[:, None] has the shape [N, 1]"
    return ""


def _try_weights(loss: PolicyLoss, per_token: bool) -> None:
    """Check that each token has a finite weight that depends on nothing but its input."""
    first, again, padded, *beside = (_weights(loss, case._replace(per_token=per_token)) for case in CASES)
    _repeated(first, again, "weights")
    _same(first, padded, "weights")
    _alone([first, *beside], "weights")


def _weights(loss: PolicyLoss, case: _Case) -> torch.Tensor:
    """The weights of the tokens that are not padding."""
    assert loss.correction is not None
    scored = _scored(loss, case)
    weight_NT = _tokens(loss.correction.weights(scored), scored, "the factor of each token's policy loss")
    _unchanged(scored, _scored(loss, case))
    return weight_NT[scored.mask_NT].detach()


def _try_loss(loss: PolicyLoss, per_token: bool) -> None:
    """Check that the loss has a value per token and a finite gradient, uses the weight, and depends on nothing but its
    input."""
    (value, again, padded, *values), (slope, slope_again, padded_slope, *slopes) = zip(
        *(_run(loss, case._replace(per_token=per_token)) for case in CASES), strict=True
    )
    if not any(each.any() for each in (slope, *slopes)):
        raise _Wrong(
            "has the gradient 0 for every token",
            "a loss teaches the policy through scored.logprobs_NT",
            "do not detach scored.logprobs_NT or compute under torch.no_grad()",
        )
    _repeated(value, again, "the loss")
    _repeated(slope, slope_again, "the gradient")
    _same(value, padded, "the loss")
    _same(slope, padded_slope, "the gradient")
    _alone([value, *values], "the loss")
    _alone([slope, *slopes], "the gradient")
    if not loss.needs_entropy and _differentiates_entropy(loss, per_token):
        raise _Wrong(
            "uses scored.entropy_NT, which has no gradient here",
            "the entropy is a constant unless the class asks for its gradient, which takes memory",
            "set entropy_gradient = True in the class, or write scored.entropy_NT.detach()",
        )
    halved = (_run(loss, case._replace(per_token=per_token), weight=0.5)[1] for case in MIXES)
    if loss.correction is not None and all(map(torch.equal, (slope, *slopes), halved)):
        raise _Wrong(
            f"does not use weight_NT, and the loss has correction={shown(loss.correction)}",
            "the correction multiplies the policy loss of each token",
            "multiply the advantage by weight_NT, or omit correction=",
        )


def _differentiates_entropy(loss: PolicyLoss, per_token: bool) -> bool:
    """Whether the loss would have a gradient with respect to the entropy, if that had one."""
    scored = _scored(loss, PAIR._replace(per_token=per_token))
    assert scored.entropy_NT is not None
    scored.entropy_NT.requires_grad_()
    made = loss.policy_loss(scored, torch.ones_like(scored.old_logprobs_NT))
    _tokens(made, scored, "the loss of each token")[scored.mask_NT].sum().backward()
    return scored.entropy_NT.grad is not None and bool(scored.entropy_NT.grad.any())


def _run(loss: PolicyLoss, case: _Case, weight: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient for the tokens that are not padding."""
    scored = _scored(loss, case)
    weight_NT = torch.full_like(scored.old_logprobs_NT, weight)
    made = loss.policy_loss(scored, weight_NT)
    loss_NT = _tokens(made, scored, "the loss of each token")
    _unchanged(scored, _scored(loss, case))
    if not (weight_NT == weight).all():
        raise _changes("weight_NT")
    if not loss_NT.requires_grad:
        raise _Wrong(
            "has no gradient",
            "a loss teaches the policy through scored.logprobs_NT",
            "compute it from scored.logprobs_NT, without detach(), .item() or torch.no_grad()",
        )
    loss_NT[scored.mask_NT].sum().backward()
    slope_NT = scored.logprobs_NT.grad
    if slope_NT is None:
        slope_NT = torch.zeros_like(scored.logprobs_NT)
    slope = slope_NT[scored.mask_NT]
    if not slope.isfinite().all():
        raise _Wrong(
            f"has the gradient {_numbers(slope)}",
            "an update with a non-finite gradient is skipped",
            "keep logarithms, divisions and roots away from 0, in padding too",
        )
    return loss_NT[scored.mask_NT].detach(), slope


def _tokens(made: Any, scored: Scored, meaning: str) -> torch.Tensor:
    """The per-token values in a formula's result."""
    value, changed = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    shape = tuple(scored.mask_NT.shape)
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        raise _Wrong(f"returned {_kind(made)}", f"a formula returns {meaning}, a tensor [N, T]", _return(meaning))
    if tuple(value.shape) != shape:
        fix = "omit mean() and sum(): the loss's aggregation reduces" if value.dim() < 2 else _return(meaning)
        raise _Wrong(f"returned {_kind(value)} for mask_NT {list(shape)}", f"a formula returns {meaning}, [N, T]", fix)
    if changed is not None and not (
        isinstance(changed, torch.Tensor) and changed.dtype == torch.bool and tuple(changed.shape) == shape
    ):
        raise _Wrong(
            f"returned {_kind(changed)} as its second value",
            "the second value is bool [N, T], True for tokens that the formula clipped or rejected",
            "return only the first value",
        )
    if not value[scored.mask_NT].isfinite().all():
        raise _Wrong(
            f"returned {_numbers(value[scored.mask_NT])} for {counted(int(scored.mask_NT.sum()), 'token')}",
            "every token needs a finite value",
            "keep logarithms, divisions and exponents in range",
        )
    return value


def _unchanged(scored: Scored, before: Scored) -> None:
    """Check that a formula has left its inputs as they were: losses, corrections and metrics share them."""
    for name, column in {**vars(before), **before.columns}.items():
        now = scored.columns[name] if name in before.columns else getattr(scored, name)
        if isinstance(column, torch.Tensor) and not torch.equal(now, column):
            shape = "" if name != "advantage" else "_NT" if column.dim() > 1 else "_N"
            raise _changes(f"scored.{name}{shape}")


def _changes(name: str) -> _Wrong:
    return _Wrong(
        f"changes {name} in place",
        "the loss, the correction and the metrics read the same tensors",
        f"compute a new tensor, without methods that end in _, such as {name.removeprefix('scored.')}.mul_()",
    )


def _repeated(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    if not torch.equal(one, other):
        raise _Wrong(
            f"gives different values for the same input: {name} of three tokens, {_numbers(one)}, became "
            f"{_numbers(other)} in a second call",
            "a run repeats its updates exactly when it is resumed, and all ranks compute the same formula",
            "compute it from scored alone, without random numbers and without state between calls",
        )


def _same(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
        raise _Wrong(
            f"depends on padding: {name} of three tokens, {_numbers(one)}, became {_numbers(other)} with other padding",
            "padding holds arbitrary values",
            "use scored.mask_NT in means and sums, as masked_mean and masked_sum of ops.masks do",
        )


def _alone(made: list[torch.Tensor], name: str) -> None:
    """Check that the values of a sample's tokens are the same in all of MIXES. `made` has the tokens of each."""
    before: dict[_Sample, torch.Tensor] = {}
    for case, values in zip(MIXES, made, strict=True):
        parts = values.split([len(sample.logprobs) for sample in case.samples])
        for sample, now in zip(case.samples, parts, strict=True):
            one = before.setdefault(sample, now)
            if not torch.allclose(one, now, rtol=1e-4, atol=1e-6):
                raise _Wrong(
                    f"mixes samples: {name} of one sample's tokens, {_numbers(one)}, became {_numbers(now)} beside "
                    "other samples",
                    "which samples are computed together depends on the microbatches and the ranks",
                    "reduce over the tokens of one sample only: dimension 1 of a tensor [N, T]",
                )


def _scored(loss: PolicyLoss, case: _Case) -> Scored:
    """The microbatch that a formula gets."""
    lengths = [len(sample.logprobs) for sample in case.samples]
    mask_NT = torch.arange(max(lengths) + case.wide) < torch.tensor(lengths)[:, None]

    def column(name: str) -> torch.Tensor:
        column_NT = torch.full(mask_NT.shape, case.padding)
        column_NT[mask_NT] = torch.tensor([number for sample in case.samples for number in getattr(sample, name)])
        return column_NT

    def read(field: Field) -> torch.Tensor:
        once = torch.tensor([sample.read_once for sample in case.samples])
        made = column("read") if field.dims == "N T" else once
        if field.dtype == "bool":
            return made > 0.5
        return made.to(getattr(torch, field.dtype)) if field.dtype.startswith("float") else (4 * made).long()

    advantage = torch.tensor([sample.advantage for sample in case.samples])
    if case.per_token:  # it grows along the response
        grown_NT = advantage[:, None] * (1 + torch.arange(mask_NT.shape[1]))
        advantage = grown_NT.masked_fill(~mask_NT, case.padding)
    return Scored(
        logprobs_NT=column("logprobs").requires_grad_(),
        old_logprobs_NT=column("old"),
        rollout_logprobs_NT=column("rollout"),
        advantage=advantage,
        mask_NT=mask_NT,
        ref_logprobs_NT=column("ref") if loss.needs_reference else None,
        entropy_NT=column("entropy").requires_grad_(loss.needs_entropy),
        columns={field.name: read(field) for field in loss.columns},
    )


def _kind(made: object) -> str:
    if isinstance(made, torch.Tensor):
        return f"a tensor {list(made.shape)} of {str(made.dtype).removeprefix('torch.')}"
    return kind_of(made)


def _numbers(values: torch.Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in values.tolist())


def _return(meaning: str) -> str:
    return f"return {meaning}: a tensor with the shape of scored.mask_NT"
