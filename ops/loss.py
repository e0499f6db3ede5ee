"""Policy losses of sampled tokens, and their aggregation. Knows no model and no optimizer.

    loss_NT, clipped_NT = clipped_policy_loss(logprobs_NT, old_logprobs_NT, advantage_N, mask_NT, 0.2, 0.28)
    normalizer = aggregation_normalizer("token", tokens, samples, max_tokens=None)  # counts of the whole minibatch
    aggregate(loss_NT, mask_NT, "token", normalizer).backward()

A masked entry, even NaN, affects no value and no gradient. `weight_NT`, 0 or more, multiplies the loss of each token
(`ops.correction`). It is applied to the advantage, so an entry of weight 0 has loss 0 and no gradient even if r
overflows.

An `advantage` is [N], one per sample, or [N, T], one per token.

Legend: N samples, T tokens. A = advantage, r = exp(logprobs - old_logprobs).
"""

from __future__ import annotations

import torch

from ops.masks import blank, masked_mean, masked_sum

AGGREGATIONS = ("token", "sequence", "sequence_sum", "fixed_length")
LEVELS = ("token", "sequence")


def clipped_policy_loss(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    advantage: torch.Tensor,
    mask_NT: torch.Tensor,
    clip_low: float,
    clip_high: float,
    *,
    dual_clip: float | None = None,
    level: str = "token",
    weight_NT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), [N, T], and bool [N, T], True if a bound is active.

    PPO (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476, eq. 10). An entry is clipped if A > 0
    and r > 1 + clip_high, or A < 0 and r < 1 - clip_low; its gradient is exactly 0, as it is for A = 0, even if r
    overflows.

    `dual_clip`, a number c above 1, bounds the loss by -c A for A < 0: such an entry is also clipped if r > c (arXiv
    1912.09729, eq. 5).

    At level "sequence", r is exp(mean over the sample's tokens of logprobs - old_logprobs), the same for all its
    tokens. Each token's gradient flows through its own logprob: GSPO-token (arXiv 2507.18071, eq. 13 and 14), which has
    the gradient of GSPO (eq. 7) if all tokens of a sample have the same weight. A token of weight 0 has no gradient.

    Raises ValueError for a negative clip, a dual_clip not above 1, an unknown level, or shapes that do not match.
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip ({clip_low}, {clip_high}) is negative or not a number")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip {dual_clip} is not above 1")
    advantage_NT = _advantage(logprobs_NT, old_logprobs_NT, advantage, mask_NT, weight_NT)
    log_ratio_NT = log_ratio(logprobs_NT, old_logprobs_NT, mask_NT, level)
    ratio_NT = log_ratio_NT.detach().exp()
    bound_NT = torch.full_like(ratio_NT, 1.0 - clip_low).masked_fill(advantage_NT > 0, 1.0 + clip_high)
    clipped_NT = torch.where(advantage_NT > 0, ratio_NT > bound_NT, (ratio_NT < bound_NT) & (advantage_NT < 0))
    if dual_clip is not None:
        dual_NT = (advantage_NT < 0) & (ratio_NT > dual_clip)
        bound_NT, clipped_NT = bound_NT.masked_fill(dual_NT, dual_clip), clipped_NT | dual_NT
    # Masked entries have advantage 0 by now. Entries without gradient get the exponent 0 before exp, because the
    # gradient of exp at NaN or at an overflow would be 0 * NaN or 0 * inf.
    still_NT = clipped_NT | (advantage_NT == 0)
    active_NT = torch.exp(log_ratio_NT.masked_fill(still_NT, 0.0))
    return -torch.where(clipped_NT, bound_NT, active_NT) * advantage_NT, clipped_NT


def log_ratio(
    logprobs_NT: torch.Tensor, old_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor, level: str = "token"
) -> torch.Tensor:
    """Return log r, [N, T] in nat, as `clipped_policy_loss` uses it. Raises ValueError for an unknown level."""
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is not one of {', '.join(LEVELS)}")
    log_ratio_NT = logprobs_NT - old_logprobs_NT
    if level == "token":
        return log_ratio_NT
    mean_N = masked_mean(log_ratio_NT.detach(), mask_NT, dim=1)
    return mean_N[:, None] + (logprobs_NT - logprobs_NT.detach())


def cispo_loss(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    advantage: torch.Tensor,
    mask_NT: torch.Tensor,
    clip_low: float | None,
    clip_high: float,
    *,
    weight_NT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -stopgrad(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs, [N, T], and bool [N, T], True if r is clipped.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): the weight of a token is bounded, and every token keeps its gradient.
    `clip_low=None` bounds r only from above, as MiniMax-M1 and TRL do; TRL's `epsilon_high` is 1 + clip_high. Raises
    ValueError for a negative clip, or shapes that do not match.
    """
    if not ((clip_low is None or clip_low >= 0) and clip_high >= 0):
        raise ValueError(f"clip ({clip_low}, {clip_high}) is negative or not a number")
    advantage_NT = _advantage(logprobs_NT, old_logprobs_NT, advantage, mask_NT, weight_NT)
    ratio_NT = blank((logprobs_NT - old_logprobs_NT).detach(), mask_NT).exp()
    bounded_NT = ratio_NT.clamp(min=None if clip_low is None else 1.0 - clip_low, max=1.0 + clip_high)
    weight_NT = bounded_NT.masked_fill(advantage_NT == 0, 0.0) * advantage_NT
    return -weight_NT * blank(logprobs_NT, mask_NT), (bounded_NT != ratio_NT) & mask_NT.bool()


def aggregation_normalizer(mode: str, tokens: int, samples: int, max_tokens: int | None) -> int:
    """Return the count that `aggregate` divides by, from the unmasked tokens and the samples of the whole *minibatch*.

    Only "fixed_length" needs `max_tokens`, the maximum response length. Raises ValueError for an unknown mode, or if
    `max_tokens` is needed and missing.
    """
    if mode == "token":
        return tokens
    if mode in ("sequence", "sequence_sum"):
        return samples
    if mode == "fixed_length":
        if max_tokens is None:
            raise ValueError("aggregation 'fixed_length' needs max_tokens, the maximum response length")
        return samples * max_tokens
    raise ValueError(f"aggregation {mode!r} is not one of {', '.join(AGGREGATIONS)}")


def aggregate(loss_NT: torch.Tensor, mask_NT: torch.Tensor, mode: str, normalizer: float) -> torch.Tensor:
    """Reduce the losses of a microbatch to one number, such that the sum over microbatches is the minibatch's loss.

    "token"         sum over tokens / normalizer, the unmasked tokens of the *minibatch* (DAPO, arXiv 2503.14476)
    "sequence"      sum over samples of their token means / normalizer, the samples of the *minibatch* (GRPO, arXiv
                    2402.03300); a sample without tokens adds 0
    "sequence_sum"  sum over tokens / normalizer, the samples of the *minibatch*: the mean of the samples' token sums
    "fixed_length"  sum over tokens / normalizer, samples of the *minibatch* times the maximum response length (Dr.
                    GRPO, arXiv 2503.20783)

    The caller passes the global count (`aggregation_normalizer`), so the result does not depend on the split into
    microbatches. Raises ValueError for an unknown mode or a normalizer that is not above 0.
    """
    if not normalizer > 0:
        raise ValueError(f"normalizer {normalizer} is not above 0")
    if mode == "sequence":
        return masked_mean(loss_NT, mask_NT, dim=1).sum() / normalizer
    if mode in AGGREGATIONS:
        return masked_sum(loss_NT, mask_NT) / normalizer
    raise ValueError(f"aggregation {mode!r} is not one of {', '.join(AGGREGATIONS)}")


def _advantage(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    advantage: torch.Tensor,
    mask_NT: torch.Tensor,
    weight_NT: torch.Tensor | None,
) -> torch.Tensor:
    """Return the advantage of each token times its weight, 0 for masked tokens."""
    same = mask_NT.dim() == 2 and logprobs_NT.shape == old_logprobs_NT.shape == mask_NT.shape
    if not (same and advantage.shape in (mask_NT.shape[:1], mask_NT.shape)):
        shapes = [tuple(tensor.shape) for tensor in (logprobs_NT, old_logprobs_NT, mask_NT, advantage)]
        raise ValueError(f"shapes {shapes} are not three times [N, T] and [N] or [N, T]")
    if advantage.dim() == 1:
        advantage = advantage[:, None].expand_as(mask_NT)
    if weight_NT is None:
        return blank(advantage, mask_NT)
    if weight_NT.shape != mask_NT.shape:
        raise ValueError(f"weight of shape {tuple(weight_NT.shape)} for a mask of shape {tuple(mask_NT.shape)}")
    return blank(advantage * weight_NT, mask_NT)
