"""The clipped policy loss and its aggregation over tokens. Knows no model and no optimizer.

    loss_NT, clipped_NT = clipped_policy_loss(logprobs_NT, old_logprobs_NT, advantage_N, mask_NT, 0.2, 0.28)
    aggregate(loss_NT, mask_NT, "token", normalizer=tokens_in_the_minibatch).backward()

Legend: N samples, T tokens. r = exp(logprobs - old_logprobs). A masked entry, even NaN, reaches no value and no
gradient.
"""

from __future__ import annotations

import torch

from ops.masks import blank, masked_mean, masked_sum

AGGREGATIONS = ("token", "sequence")


def clipped_policy_loss(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    advantage_N: torch.Tensor,
    mask_NT: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), [N, T], and where its clipped branch is active, bool [N, T].

    PPO (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476, eq. 10). An entry is clipped where A > 0
    and r > 1 + clip_high, or A < 0 and r < 1 - clip_low; its gradient is exactly 0, and so is that of A = 0, even where
    r overflows. Raises ValueError for a negative clip or a shape that does not match.
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip ({clip_low}, {clip_high}) is negative or not a number")
    if not (logprobs_NT.shape == old_logprobs_NT.shape == mask_NT.shape and advantage_N.shape == mask_NT.shape[:1]):
        shapes = [tuple(tensor.shape) for tensor in (logprobs_NT, old_logprobs_NT, mask_NT, advantage_N)]
        raise ValueError(f"shapes {shapes} are not three times [N, T] and [N]")
    advantage_NT = blank(advantage_N[:, None].expand_as(mask_NT), mask_NT)
    log_ratio_NT = logprobs_NT - old_logprobs_NT
    ratio_NT = log_ratio_NT.detach().exp()
    bound_NT = torch.full_like(ratio_NT, 1.0 - clip_low).masked_fill(advantage_NT > 0, 1.0 + clip_high)
    clipped_NT = torch.where(advantage_NT > 0, ratio_NT > bound_NT, (ratio_NT < bound_NT) & (advantage_NT < 0))
    # Masked entries have advantage 0 by now. What has no gradient gets the exponent 0 before exp, because the gradient
    # of exp at NaN or at an overflow would be 0 * NaN or 0 * inf.
    still_NT = clipped_NT | (advantage_NT == 0)
    active_NT = torch.exp(log_ratio_NT.masked_fill(still_NT, 0.0))
    return -torch.where(clipped_NT, bound_NT, active_NT) * advantage_NT, clipped_NT


def aggregate(loss_NT: torch.Tensor, mask_NT: torch.Tensor, mode: str, normalizer: float) -> torch.Tensor:
    """One number from the losses of a microbatch, such that the sum over microbatches is the loss of the minibatch.

    "token"     sum over tokens / normalizer, the count of unmasked tokens in the *minibatch* (DAPO, arXiv 2503.14476)
    "sequence"  sum over samples of their token means / normalizer, the count of samples in the *minibatch* (GRPO, arXiv
                2402.03300); a sample without tokens adds 0

    The caller gives the global count, so the result does not depend on how microbatches are cut. Raises ValueError for
    another mode or a normalizer that is not above 0.
    """
    if not normalizer > 0:
        raise ValueError(f"normalizer {normalizer} is not above 0")
    if mode == "token":
        return masked_sum(loss_NT, mask_NT) / normalizer
    if mode == "sequence":
        return masked_mean(loss_NT, mask_NT, dim=1).sum() / normalizer
    raise ValueError(f"aggregation {mode!r} is not one of {', '.join(AGGREGATIONS)}")
