"""Estimators of the KL divergence to a reference policy, from the log-probabilities of sampled tokens.

Legend: N samples, T tokens. x = logprobs - ref_logprobs, in nat.
"""

from __future__ import annotations

import torch

from ops.masks import blank


def kl_k3(
    logprobs_NT: torch.Tensor, ref_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor | None = None
) -> torch.Tensor:
    """exp(-x) + x - 1, [N, T] in nat: the KL term of GRPO (arXiv 2402.03300, eq. 4). Never negative.

    As a *value* it is an unbiased estimate of KL(policy || reference) for tokens that the policy sampled, with less
    variance than x. As a *loss* it is biased: the expectation of its gradient is that of KL(reference || policy), not
    of KL(policy || reference) (arXiv 2506.09477; arXiv 2510.01555). GRPO uses it as a loss, and so does this.

    With `mask_NT`, a masked entry is 0 whatever it holds, and passes no gradient; without one, NaN stays NaN.
    """
    if mask_NT is not None:
        logprobs_NT, ref_logprobs_NT = blank(logprobs_NT, mask_NT), blank(ref_logprobs_NT, mask_NT)
    x_NT = logprobs_NT - ref_logprobs_NT
    return torch.exp(-x_NT) + x_NT - 1.0
