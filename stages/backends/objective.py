"""The loss of one microbatch, from a description and what the policy says of the tokens. For every backend that trains.

    value, sums = objective(loss, Scored(...), tokens=tokens, samples=samples)
    value.backward()

`tokens` and `samples` count the whole minibatch, all microbatches of all ranks: the sum of the values over all
microbatches of all ranks is the loss, however it is cut. Knows no model, no optimizer and no communication.

Legend: N samples, T tokens of the longest response.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ops.correction import decoupled, icepop, sequence_mask, truncated_is
from ops.kl import kl_estimate
from ops.loss import aggregate, aggregation_normalizer, cispo_loss, clipped_policy_loss
from stages.backends import Optimization
from stages.losses import CispoLoss, ClippedLoss, Correction, Decoupled, IcePop, PolicyLoss, SequenceMask, TruncatedIS

MAXIMA = ("ratio_max",)  # what the caller combines by max; everything else adds up


@dataclass(frozen=True, eq=False)
class Scored:
    """Log-probabilities of the response tokens, in nat, padded to [N, T]; what lies in padding is never looked at.

    logprobs_NT          of the policy that is trained, with a gradient
    old_logprobs_NT      of the policy before the step's first update, the denominator of the ratio
    rollout_logprobs_NT  of the sampler; needed where the loss has a correction
    advantage_N          one a sample
    mask_NT              bool, True where there is a token
    ref_logprobs_NT      of the frozen model; needed where the loss has a KL term
    entropy_NT           of the policy's next token; with a gradient where the loss has an entropy bonus
    """

    logprobs_NT: torch.Tensor
    old_logprobs_NT: torch.Tensor
    rollout_logprobs_NT: torch.Tensor | None
    advantage_N: torch.Tensor
    mask_NT: torch.Tensor
    ref_logprobs_NT: torch.Tensor | None = None
    entropy_NT: torch.Tensor | None = None


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
    weight_NT = None
    if loss.correction is not None:
        weight_NT, changed_NT = _weights(loss.correction, scored)
        sums |= {"is_weight": weight_NT.sum(), "is_changed": changed_NT.sum()}
    loss_NT, clipped_NT = _policy_loss(loss, scored, weight_NT)
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


def _policy_loss(loss: PolicyLoss, scored: Scored, weight_NT: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    given = (scored.logprobs_NT, scored.old_logprobs_NT, scored.advantage_N, scored.mask_NT)
    match loss:
        case ClippedLoss():
            low, high = loss.clip
            return clipped_policy_loss(
                *given, low, high, dual_clip=loss.dual_clip, level=loss.ratio, weight_NT=weight_NT
            )
        case CispoLoss():
            least, most = loss.clip
            return cispo_loss(*given, least, most, weight_NT=weight_NT)
    raise TypeError(f"no formula is known for {type(loss).__name__}")


def _weights(correction: Correction, scored: Scored) -> tuple[torch.Tensor, torch.Tensor]:
    assert scored.rollout_logprobs_NT is not None  # `_check` has seen to it
    given = (scored.old_logprobs_NT, scored.rollout_logprobs_NT, scored.mask_NT)
    match correction:
        case TruncatedIS():
            return truncated_is(*given, correction.cap, correction.level)
        case IcePop():
            return icepop(*given, correction.low, correction.high, correction.level)
        case SequenceMask():
            return sequence_mask(*given, correction.low, correction.high)
        case Decoupled():
            return decoupled(*given)
    raise TypeError(f"no formula is known for {type(correction).__name__}")


def _check(loss: PolicyLoss, scored: Scored) -> None:
    for needed, column, name in (
        (loss.needs_reference, scored.ref_logprobs_NT, "ref_logprobs_NT"),
        (loss.correction is not None, scored.rollout_logprobs_NT, "rollout_logprobs_NT"),
        (loss.entropy > 0, scored.entropy_NT, "entropy_NT"),
    ):
        if needed and column is None:
            raise ValueError(f"{loss} needs {name}")


def learning_rate(settings: Optimization, update: int) -> float:
    """Of update number `update`, counted from 0."""
    if update < settings.warmup:
        return settings.lr * (update + 1) / settings.warmup
    span = max(settings.updates - settings.warmup, 1)
    done = min((update - settings.warmup) / span, 1.0)
    if settings.schedule == "linear":
        return settings.lr * (1.0 - done)
    if settings.schedule == "cosine":
        return settings.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr
