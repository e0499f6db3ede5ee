"""Selects a token from logits and a random number, by one rule for all backends. Knows tensors only.

Legend: B rows, V vocabulary, K blocks of W tokens.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ops.kernels import has_kernels
from stages.backends.interface import Sampling

BLOCK = 512  # tokens


def choose(
    logits_BV: torch.Tensor, sampling: Sampling, uniform_B: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row. Also returns its logprob under softmax(logits / temperature) over the whole vocabulary.

    Probabilities are truncated by min_p, then top_k, then top_p (Holtzman et al. 2020: the smallest set with total
    probability top_p). On a GPU with Triton, what truncates nothing reads the logits once (choose_kernel.py).
    """
    if uniform_B is not None and _is_whole(sampling, logits_BV.shape[-1]) and has_kernels(logits_BV):
        from stages.backends.choose_kernel import choose_whole

        return choose_whole(logits_BV, uniform_B, sampling.temperature)
    logits_BV = logits_BV.float()
    if sampling.greedy:
        logprobs_BV = logits_BV.log_softmax(-1)
        tokens_B = logprobs_BV.argmax(-1)
    else:
        if uniform_B is None:
            raise ValueError("sampling needs one uniform number per token")
        logprobs_BV = (logits_BV if sampling.temperature == 1 else logits_BV / sampling.temperature).log_softmax(-1)
        tokens_B = _at(_cut(logprobs_BV.exp(), sampling), uniform_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def _is_whole(sampling: Sampling, width: int) -> bool:
    """Whether a token is drawn from all of the vocabulary."""
    return not sampling.greedy and sampling.min_p <= 0 and not _truncates(sampling, width)


def _truncates(sampling: Sampling, width: int) -> bool:
    return 0 < sampling.top_k < width or sampling.top_p < 1.0


def _at(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The token of each row at which the cumulative weight exceeds the fraction `uniform_B` of the total.

    Sums are float64, so a large vocabulary loses no precision. Block sums come first, then sums within one block: on a
    GPU, a running sum over the whole vocabulary costs more than all other parts of the selection. Weights that are not
    finite choose any token.
    """
    width = weights_BV.shape[-1]
    blocks_BKW = pad(weights_BV, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    cumulative_BK = blocks_BKW.sum(-1, dtype=torch.float64).cumsum(-1)
    target_B1 = _below(uniform_B[:, None] * cumulative_BK[:, -1:], cumulative_BK[:, -1:])
    block_B1 = torch.searchsorted(cumulative_BK, target_B1, right=True).clamp(max=cumulative_BK.shape[-1] - 1)
    before_B1 = torch.where(block_B1 > 0, cumulative_BK.gather(-1, (block_B1 - 1).clamp(min=0)), 0.0)
    rows_B = torch.arange(len(weights_BV), device=weights_BV.device)
    cumulative_BW = blocks_BKW[rows_B, block_B1[:, 0]].double().cumsum(-1)
    within_B1 = torch.searchsorted(cumulative_BW, _below(target_B1 - before_B1, cumulative_BW[:, -1:]), right=True)
    return (block_B1 * BLOCK + within_B1)[:, 0].clamp(max=width - 1)


def _below(target_B1: torch.Tensor, total_B1: torch.Tensor) -> torch.Tensor:
    """The target, kept below the total despite rounding, so that the selected token has a weight above 0."""
    return torch.minimum(target_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))


def _cut(probabilities_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Zero out probabilities below min_p or outside the top_k and top_p sets; ties at the edge keep the lower id."""
    width = probabilities_BV.shape[-1]
    if sampling.min_p > 0:
        floor_B1 = sampling.min_p * probabilities_BV.amax(-1, keepdim=True)
        probabilities_BV = probabilities_BV.masked_fill(probabilities_BV < floor_B1, 0.0)
    if not _truncates(sampling, width):
        return probabilities_BV
    sorted_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < width:
        sorted_BV[:, sampling.top_k :] = 0.0
    before_BV = sorted_BV.double().cumsum(-1) - sorted_BV
    sorted_BV[before_BV >= sampling.top_p * sorted_BV.double().sum(-1, keepdim=True)] = 0.0
    return torch.zeros_like(probabilities_BV).scatter(-1, order_BV, sorted_BV)
