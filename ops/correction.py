"""Weights that correct for samples from a policy other than the trainer's policy before its update.

The sampler's logprobs differ from the trainer's because its kernels round differently and, with staleness, because its
weights are older. With w = exp(prev - rollout) = pi_prev / pi_rollout of a token, each function returns the weight that
multiplies the token's policy loss, and a bool that is True if that weight is not w itself:

    weight_NT, changed_NT = truncated_is(prev_logprobs_NT, rollout_logprobs_NT, mask_NT, cap=2.0)

Weights are detached. The denominator of the aggregation stays the count of all unmasked tokens or samples: removing
tokens lowers the loss but does not raise the weight of the others. A masked entry, even NaN, has weight 0, is not
changed, and affects no other entry. An unmasked NaN stays NaN. A ratio that overflows becomes the largest finite
number. All functions raise ValueError for a bound out of range, or shapes that differ.

Legend: N samples, T tokens. Log-probabilities in nat.
"""

from __future__ import annotations

import torch

from ops.masks import blank, masked_mean, masked_sum

LEVELS = ("token", "sequence")


def moments(prev_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> tuple[float, float, float]:
    """Return the sum of w, the sum of w squared, and the largest w (0 without tokens), of tokens without padding, any
    shape; in float64.

    (sum w)^2 / sum w^2 is the effective sample size: the number of equally weighted tokens that estimate equally well
    (Kish 1965).
    """
    ratio = (prev_logprobs.double() - rollout_logprobs.double()).exp()
    largest = ratio.max().item() if ratio.numel() else 0.0
    return ratio.sum().item(), ratio.square().sum().item(), largest


def multiplicative_error(prev_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> float:
    """Return the sum of exp(|prev - rollout|) over tokens without padding, any shape; in float64.

    Per token, this is the factor by which the two probabilities differ, whichever is larger: 1 if they are equal.
    NeMo-RL reports its mean as `token_mult_prob_error`.
    """
    return (prev_logprobs.double() - rollout_logprobs.double()).abs().exp().sum().item()


def truncated_is(
    prev_logprobs_NT: torch.Tensor,
    rollout_logprobs_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    cap: float,
    level: str = "token",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return min(w, cap), and True for capped tokens: truncated importance sampling (Yao et al. 2025, "Your Efficient
    RL Framework Secretly Brings You Off-Policy RL Training").

    At level "sequence", w is the ratio of the whole response, the product over its tokens, for all of its tokens.
    """
    if not cap > 0:
        raise ValueError(f"cap {cap} is not above 0")
    raw_NT = _ratio(prev_logprobs_NT, rollout_logprobs_NT, mask_NT, level)
    return raw_NT.clamp(max=cap), raw_NT > cap


def icepop(
    prev_logprobs_NT: torch.Tensor,
    rollout_logprobs_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    low: float,
    high: float,
    level: str = "token",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w if low <= w <= high, else 0, and True for removed tokens: IcePop (Ring-1T, arXiv 2510.18855).

    At level "sequence", w is the ratio of the whole response, which is kept or removed as a whole.
    """
    _check_bounds(low, high)
    raw_NT = _ratio(prev_logprobs_NT, rollout_logprobs_NT, mask_NT, level)
    changed_NT = ((raw_NT < low) | (raw_NT > high)) & mask_NT.bool()
    return raw_NT.masked_fill(changed_NT, 0.0), changed_NT


def sequence_mask(
    prev_logprobs_NT: torch.Tensor,
    rollout_logprobs_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the untruncated w of each token if the geometric mean of the response's w is in [low, high], else 0, and
    True for removed tokens.

    NeMo-RL's `seq-mask-tis`. A response without tokens has the mean 1.
    """
    _check_bounds(low, high)
    log_NT = _log_ratio(prev_logprobs_NT, rollout_logprobs_NT, mask_NT)
    mean_N1 = masked_mean(log_NT, mask_NT, dim=1).exp()[:, None]
    changed_NT = ((mean_N1 < low) | (mean_N1 > high)) & mask_NT.bool()
    return blank(_exp(log_NT), mask_NT).masked_fill(changed_NT, 0.0), changed_NT


def decoupled(
    prev_logprobs_NT: torch.Tensor, rollout_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w unchanged: decoupled PPO with pi_prox = pi_prev and pi_behav = pi_rollout (AReaL, arXiv 2505.24298)."""
    raw_NT = _ratio(prev_logprobs_NT, rollout_logprobs_NT, mask_NT, "token")
    return raw_NT, torch.zeros_like(raw_NT, dtype=torch.bool)


def _ratio(prev_NT: torch.Tensor, rollout_NT: torch.Tensor, mask_NT: torch.Tensor, level: str) -> torch.Tensor:
    """Return w, [N, T], 0 for masked tokens."""
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is not one of {', '.join(LEVELS)}")
    log_NT = _log_ratio(prev_NT, rollout_NT, mask_NT)
    if level == "sequence":
        log_NT = masked_sum(log_NT, mask_NT, dim=1)[:, None].expand_as(log_NT)
    return blank(_exp(log_NT), mask_NT)


def _log_ratio(prev_NT: torch.Tensor, rollout_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    if not prev_NT.shape == rollout_NT.shape == mask_NT.shape or mask_NT.dim() != 2:
        shapes = [tuple(tensor.shape) for tensor in (prev_NT, rollout_NT, mask_NT)]
        raise ValueError(f"shapes {shapes} are not three times [N, T]")
    return blank(prev_NT.detach() - rollout_NT.detach(), mask_NT)


def _exp(log_NT: torch.Tensor) -> torch.Tensor:
    # Infinity times an advantage of 0 would be NaN.
    return log_NT.exp().clamp(max=torch.finfo(log_NT.dtype).max)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"bounds ({low}, {high}) are not 0 <= low <= 1 <= high")
