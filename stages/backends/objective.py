"""The loss of one microbatch, from a description and what the policy says of the tokens. For every backend that trains.

    value, sums = objective(loss, Scored(...), tokens=tokens, samples=samples)
    value.backward()

`tokens` and `samples` count the whole minibatch, all microbatches of all ranks: the sum of the values over all
microbatches of all ranks is the loss, however it is cut. Knows no model, no optimizer and no communication.

Legend: N samples, T tokens of the longest response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ops.kl import kl_estimate
from ops.loss import aggregate, aggregation_normalizer
from ops.masks import blank
from stages.losses import PolicyLoss, Scored

if TYPE_CHECKING:
    from stages.losses import Formula

MAXIMA = ("ratio_max",)  # what the caller combines by max; everything else adds up


def objective(loss: PolicyLoss, scored: Scored, *, tokens: int, samples: int) -> tuple[torch.Tensor, dict[str, float]]:
    """This microbatch's share of the loss, to call backward on, and its share of the metrics.

    The loss is aggregate(weight x policy loss + kl x estimate - entropy x bonus), each part aggregated the same way;
    the weight is that of the correction, which leaves the denominator as it is.

    The metrics are sums over the tokens of this microbatch: `clip_fraction`, and of it `clip_high`, where the ratio is
    above 1; `ratio_mean`; `entropy`, `kl` (by the loss's estimator) where their columns are given; with a correction
    `is_weight` and `is_changed`, how many tokens were truncated or taken out. The caller adds them over microbatches
    and ranks and divides by `tokens`. Two are combined otherwise:
    `loss` adds up and is not divided, `ratio_max` is the largest ratio of a token (see MAXIMA). They are read from the
    device at once. Raises ValueError where a column is missing that the loss needs.
    """
    _check(loss, scored)
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
    if scored.ref_logprobs_NT is not None:
        kl_NT = kl_estimate(scored.logprobs_NT, scored.ref_logprobs_NT, mask_NT, loss.kl_estimator, loss.kl_importance)
        if loss.kl > 0:
            loss_NT = loss_NT + loss.kl * kl_NT
        sums["kl"] = kl_NT.detach().sum()
    if scored.entropy_NT is not None:
        if loss.entropy > 0:
            loss_NT = loss_NT - loss.entropy * scored.entropy_NT
        sums["entropy"] = scored.entropy_NT.detach().masked_fill(masked_NT, 0.0).sum()
    value = aggregate(loss_NT, mask_NT, loss.aggregation, normalizer)
    log_ratio_NT = (scored.logprobs_NT.detach() - scored.old_logprobs_NT).masked_fill_(masked_NT, -torch.inf)
    ratio_NT = log_ratio_NT.exp()
    sums["clip_fraction"] = clipped_NT.sum()
    sums["clip_high"] = (clipped_NT & (log_ratio_NT > 0)).sum()
    sums["ratio_mean"] = ratio_NT.sum()
    sums["ratio_max"] = ratio_NT.max()
    sums["loss"] = value.detach()
    return value, _read(sums)


def _read(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """The numbers on the host, by one transfer."""
    numbers = list(sums.values())
    if numbers[0].device.type != "cpu":
        numbers = list(torch.stack([number.double() for number in numbers]).cpu())
    return {name: float(number.item()) for name, number in zip(sums, numbers)}


def _both(made: Formula, mask_NT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a formula returned of each token, and which tokens it changed: none where it does not say."""
    value_NT, changed_NT = made if isinstance(made, tuple) else (made, torch.zeros_like(mask_NT))
    return value_NT, changed_NT & mask_NT


def _check(loss: PolicyLoss, scored: Scored) -> None:
    for needed, column, name in (
        (loss.needs_reference, scored.ref_logprobs_NT, "ref_logprobs_NT"),
        (loss.correction is not None, scored.rollout_logprobs_NT, "rollout_logprobs_NT"),
        (loss.needs_entropy, scored.entropy_NT, "entropy_NT"),
    ):
        if needed and column is None:
            raise ValueError(f"{loss} needs {name}")
