"""Computes the loss of one microbatch from a loss description and the policy's outputs. Shared by training backends.

    value, sums = objective(loss, Scored(...), tokens=tokens, samples=samples)
    value.backward()

`tokens` and `samples` count the whole minibatch, over all microbatches of all ranks. The values of all these
microbatches sum to the loss, however the minibatch is divided. Knows no model, no optimizer and no communication.

Legend: N samples, T tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ops.kl import kl_estimate
from ops.loss import aggregate, aggregation_normalizer
from ops.masks import blank
from stages.losses import PolicyLoss, Scored

if TYPE_CHECKING:
    from stages.losses import Formula

MAXIMA = ("ratio_max",)  # combined by maximum; all other metrics are summed


def objective(loss: PolicyLoss, scored: Scored, *, tokens: int, samples: int) -> tuple[torch.Tensor, dict[str, float]]:
    """Return what `on_device` returns, with the metrics as numbers."""
    value, sums = on_device(loss, scored, tokens=tokens, samples=samples)
    return value, read([sums])[0]


def on_device(
    loss: PolicyLoss, scored: Scored, *, tokens: int, samples: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this microbatch's share of the loss, for the backward pass, and its share of the metrics.

    The loss is aggregate(weight x policy loss + kl x estimate - entropy x bonus), each part aggregated the same way;
    the weight is the correction's and does not change the denominator.

    Metrics are sums over the tokens of this microbatch: `clip_fraction`, and its part `clip_high` with a ratio above 1;
    `ratio_mean`; `entropy` and `kl` (by the loss's estimator) if their columns are given; with a correction `is_weight`
    and `is_changed`, the number of tokens truncated or rejected. The caller sums them over microbatches and ranks and
    divides by `tokens`. Two exceptions: `loss` is summed but not divided, and `ratio_max` is the largest ratio of a
    token (see MAXIMA). They stay on the device until `read`. Raises ValueError if a column that the loss needs is
    missing.
    """
    _check(loss, scored)
    scored = _shielded(scored)
    mask_NT = scored.mask_NT
    masked_NT = ~mask_NT
    normalizer = aggregation_normalizer(loss.aggregation, tokens, samples, loss.max_tokens)
    sums: dict[str, torch.Tensor] = {}
    weight_NT = torch.ones_like(scored.old_logprobs_NT)
    if loss.correction is not None:
        weight_NT, changed_NT = _both(loss.correction.weights(scored), mask_NT)
        weight_NT = blank(weight_NT.detach(), mask_NT)
        sums |= {"is_weight": weight_NT.sum(), "is_changed": changed_NT.sum()}
    loss_NT, clipped_NT = _both(loss.policy_loss(scored, weight_NT), mask_NT)
    clipped_NT = clipped_NT & (weight_NT != 0)  # tokens that the correction removed are not clipped
    if scored.ref_logprobs_NT is not None:
        kl_NT = kl_estimate(
            scored.logprobs_NT, scored.ref_logprobs_NT, mask_NT, loss.kl_estimator, loss.kl_importance, loss.kl_clamp
        )
        if loss.kl > 0:
            loss_NT = loss_NT + loss.kl * kl_NT
        sums["kl"] = kl_NT.detach().sum()
    if scored.entropy_NT is not None:
        if loss.entropy > 0:
            loss_NT = loss_NT - loss.entropy * scored.entropy_NT
        sums["entropy"] = scored.entropy_NT.detach().masked_fill(masked_NT, 0.0).sum()
    value = aggregate(loss_NT, mask_NT, loss.aggregation, normalizer)
    log_ratio_NT = loss.log_ratio(scored).detach().masked_fill(masked_NT, -torch.inf)
    ratio_NT = log_ratio_NT.exp()
    sums["clip_fraction"] = clipped_NT.sum()
    sums["clip_high"] = (clipped_NT & (log_ratio_NT > 0)).sum()
    sums["ratio_mean"] = ratio_NT.sum()
    sums["ratio_max"] = ratio_NT.max()
    sums["loss"] = value.detach()
    return value, sums


def _shielded(scored: Scored) -> Scored:
    """The same inputs, but whatever a formula computes at padding sends no gradient there: what padding holds depends
    on how the minibatch is divided."""

    def cut(column_NT: torch.Tensor) -> torch.Tensor:
        return torch.where(scored.mask_NT, column_NT, column_NT.detach()) if column_NT.requires_grad else column_NT

    entropy_NT = scored.entropy_NT if scored.entropy_NT is None else cut(scored.entropy_NT)
    return replace(scored, logprobs_NT=cut(scored.logprobs_NT), entropy_NT=entropy_NT)


def read(found: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, float]]:
    """Return the metrics of microbatches as numbers, in one transfer from the device."""
    numbers = [number for sums in found for number in sums.values()]
    if numbers and numbers[0].device.type != "cpu":
        numbers = list(torch.stack([number.double() for number in numbers]).cpu())
    each = iter(numbers)
    return [{name: float(next(each).item()) for name in sums} for sums in found]


def _both(made: Formula, mask_NT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A formula's value per token, and which tokens it changed: none if it does not return them."""
    value_NT, changed_NT = made if isinstance(made, tuple) else (made, torch.zeros_like(mask_NT))
    if value_NT.shape != mask_NT.shape:  # it would be broadcast without a word
        raise ValueError(
            f"a formula returned {list(value_NT.shape)} for mask_NT {list(mask_NT.shape)}: one value per token"
        )
    return value_NT, changed_NT & mask_NT


def _check(loss: PolicyLoss, scored: Scored) -> None:
    for needed, column, name in (
        (loss.needs_reference, scored.ref_logprobs_NT, "ref_logprobs_NT"),
        (loss.correction is not None, scored.rollout_logprobs_NT, "rollout_logprobs_NT"),
        (loss.needs_entropy, scored.entropy_NT, "entropy_NT"),
    ):
        if needed and column is None:
            raise ValueError(f"{loss} needs {name}")
