"""Estimators of the KL divergence to a reference policy, from the log-probabilities of sampled tokens.

    kl_NT = kl_estimate(logprobs_NT, ref_logprobs_NT, mask_NT, kind="k2")

Legend: N samples, T tokens. x = logprobs - ref_logprobs, in nat.
"""

from __future__ import annotations

import math

import torch

from ops.masks import blank

ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(
    logprobs_NT: torch.Tensor,
    ref_logprobs_NT: torch.Tensor,
    mask_NT: torch.Tensor | None = None,
    kind: str = "k3",
    importance: bool = False,
    clamp: float | None = None,
) -> torch.Tensor:
    """Estimate KL(policy || reference) per token, [N, T] in nat, for tokens that the policy sampled.

                                  as a value          expected gradient as a loss
        k1   x                    unbiased            0
        k2   x^2 / 2              biased, 0 or more   gradient of KL(policy || reference)
        k3   exp(-x) + x - 1      unbiased, 0 or more gradient of KL(reference || policy)

    `importance` multiplies by exp(logprobs - stopgrad(logprobs)), which equals 1 and has the gradient of logprobs. The
    expected gradient is then the gradient of the expected value: of KL(policy || reference) for k1 and k3, but not for
    k2, whose value is biased. KL and its gradient refer to the next token at the sampled prefixes (arXiv 2506.09477;
    arXiv 2510.01555). For tokens sampled by an older policy, both hold only as far as its probabilities agree with the
    policy's.

    The gradient of k3 grows without bound as x falls: -12.5 at x = -2.6. `clamp`, a number above 0, limits each
    estimate to [-clamp, clamp]; beyond it the estimate has no gradient. verl 0.9 and NeMo-RL limit k3 to 10; GRPO's
    paper does not limit it.

    With `mask_NT`, masked entries become 0 and pass no gradient; without it, NaN stays NaN. Raises ValueError for an
    unknown kind, or a clamp that is not above 0.
    """
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp {clamp} is not above 0")
    if mask_NT is not None:
        logprobs_NT, ref_logprobs_NT = blank(logprobs_NT, mask_NT), blank(ref_logprobs_NT, mask_NT)
    if kind == "k3":
        near_NT = logprobs_NT
        if clamp is not None:  # exp(-x) overflows far beyond the clamp, and its gradient is NaN there
            near_NT = torch.maximum(logprobs_NT, ref_logprobs_NT.detach() - math.log(2 * clamp + 4))
        kl_NT = kl_k3(near_NT, ref_logprobs_NT)
    elif kind == "k2":
        kl_NT = (logprobs_NT - ref_logprobs_NT).square() / 2
    elif kind == "k1":
        kl_NT = logprobs_NT - ref_logprobs_NT
    else:
        raise ValueError(f"KL estimator {kind!r} is not one of {', '.join(ESTIMATORS)}")
    if clamp is not None:
        kl_NT = kl_NT.clamp(-clamp, clamp)
    return kl_NT * torch.exp(logprobs_NT - logprobs_NT.detach()) if importance else kl_NT


def kl_k3(
    logprobs_NT: torch.Tensor, ref_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor | None = None
) -> torch.Tensor:
    """Return exp(-x) + x - 1, [N, T] in nat: the KL term of GRPO (arXiv 2402.03300, eq. 4). Never negative.

    As a *value*, it is an unbiased estimate of KL(policy || reference) for tokens that the policy sampled, with less
    variance than x. As a *loss*, it is biased: its expected gradient is the gradient of KL(reference || policy), not of
    KL(policy || reference) (arXiv 2506.09477; arXiv 2510.01555). GRPO uses it as a loss, and so does Sluice.

    With `mask_NT`, masked entries become 0 and pass no gradient; without it, NaN stays NaN.
    """
    if mask_NT is not None:
        logprobs_NT, ref_logprobs_NT = blank(logprobs_NT, mask_NT), blank(ref_logprobs_NT, mask_NT)
    x_NT = logprobs_NT - ref_logprobs_NT
    return torch.expm1(-x_NT) + x_NT  # exp(-x) + x - 1 rounds below 0 near 0
