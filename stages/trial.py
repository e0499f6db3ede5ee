"""Runs a user's loss once, on two samples of two tokens, before anything is started. Loads torch.

A formula that raises, returns another shape, gives no gradient or looks into padding would otherwise end the run at its
first update, or, worse, train on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipeline.errors import Problem, told
from stages.backends.objective import objective
from stages.losses import Correction, PolicyLoss
from stages.scored import Scored

MASK_NT = torch.tensor([[True, True], [True, False]])
COLUMNS = ("logprobs_NT", "old_logprobs_NT", "rollout_logprobs_NT", "ref_logprobs_NT", "entropy_NT")


def formula_problems(loss: PolicyLoss, where: str) -> Iterator[Problem]:
    """What is wrong with the formula of a loss, or of its correction."""
    owners = [*([loss.correction] if loss.correction else []), loss]
    try:
        for owner in owners:
            what = _wrong_shape(owner, _scored(padding=0.0))
            if what:
                yield _problem(
                    where,
                    owner,
                    what,
                    "a loss returns [N, T], a correction a pair of them",
                    "see docs/your-own-loss.md",
                )
                return
        value, gradient_NT = _run(loss, padding=0.0)
    except Exception as error:  # noqa: BLE001 - user code enters here
        why = "its formula was run once on two samples of two tokens"
        yield _problem(where, loss, f"raised {told(error)}", why, "fix the formula")
        return
    if not bool(torch.isfinite(value)):
        why = "its formula was run once on two samples of two tokens, with ordinary logprobs"
        yield _problem(where, loss, f"is {value.item()} for finite columns", why, "a formula that stays finite")
    elif gradient_NT is None or not bool(gradient_NT.any()):
        why = "an update follows the gradient of the loss with respect to the logprobs"
        yield _problem(where, loss, "has no gradient", why, "compute it from scored.logprobs_NT, without detach()")
    else:
        other, _ = _run(loss, padding=-3.0)
        if not torch.equal(value, other):
            why = "padding holds arbitrary numbers, so the loss would depend on how a batch is cut"
            yield _problem(where, loss, "changes with what padding holds", why, "apply scored.mask_NT")


def _scored(padding: float) -> Scored:
    """Two samples of two tokens, of which one is padding."""
    random = torch.Generator().manual_seed(0)
    columns = {name: -0.5 - torch.rand(2, 2, generator=random) for name in COLUMNS}
    columns["entropy_NT"] = -columns["entropy_NT"]
    columns = {name: column.masked_fill(~MASK_NT, padding) for name, column in columns.items()}
    for name in ("logprobs_NT", "entropy_NT"):
        columns[name].requires_grad_()
    return Scored(advantage_N=torch.tensor([1.0, -0.5]), mask_NT=MASK_NT, **columns)


def _run(loss: PolicyLoss, padding: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    scored = _scored(padding)
    value, _ = objective(loss, scored, tokens=3, samples=2)
    if value.requires_grad:
        value.backward()
    return value.detach(), scored.logprobs_NT.grad


def _wrong_shape(owner: PolicyLoss | Correction, scored: Scored) -> str | None:
    """What is wrong with the type or shape of what a formula returns."""
    given = scored if owner.masks_padding else scored.without_padding()
    if isinstance(owner, Correction):
        made: object = owner.weights(given)
        if not (isinstance(made, tuple) and len(made) == 2):
            return f"returns {_shown(made)} from weights(), not a pair"
    else:
        made = owner.policy_loss(given)
    for each in made if isinstance(made, tuple) else (made,):
        if not (isinstance(each, torch.Tensor) and each.shape == MASK_NT.shape):
            return f"returns {_shown(each)} for columns of shape [2, 2]"
    return None


def _shown(made: object) -> str:
    return f"a tensor of shape {list(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__


def _problem(where: str, owner: PolicyLoss | Correction, what: str, why: str, fix: str) -> Problem:
    return Problem(where=where, what=f"{type(owner).__name__} {what}", why=why, fix=fix)
