"""Log-probabilities of given tokens, and entropy, from logits. Knows no model; callers divide by the temperature.

    logprobs_NT = selected_logprobs(logits_NTV / temperature, response_ids_NT)
    entropy_NT = entropy(logits_NTV.detach() / temperature)

Legend: N samples, T tokens, V vocabulary, R rows of N * T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_CHUNK_ELEMENTS = 1 << 25  # maximum number of logits copied at a time: 128 MiB in float32


def selected_logprobs(logits_NTV: torch.Tensor, ids_NT: torch.Tensor) -> torch.Tensor:
    """Return log softmax(logits)[id], [N, T] in nat, never above 0; differentiable once in the logits.

    Computed as logit - logsumexp over blocks of rows, so the forward pass needs no second tensor of the size of the
    logits, and the backward pass only their gradient. Half precision is reduced in float32 and returns float32; other
    dtypes are kept. Raises ValueError if the shapes do not match.
    """
    if logits_NTV.shape[:-1] != ids_NT.shape:
        raise ValueError(f"logits {tuple(logits_NTV.shape)} and ids {tuple(ids_NT.shape)} are not [..., V] and [...]")
    return _SelectedLogprobs.apply(logits_NTV, ids_NT)


def entropy(logits_NTV: torch.Tensor) -> torch.Tensor:
    """Return the exact entropy of softmax(logits), [N, T] in nat: logsumexp - sum p logit. A logit of -inf excludes a
    token.

    Differentiable once in the logits, for an entropy bonus: the gradient is another tensor of the size of the logits,
    and together with the gradient of `selected_logprobs` there are three at once. For a metric, pass
    `logits_NTV.detach()`.

    Logits are taken relative to the largest one, which affects only the rounding. Half precision is reduced in float32
    and returns float32.
    """
    return _Entropy.apply(logits_NTV)


def _entropy_rows(logits_RV: torch.Tensor) -> torch.Tensor:
    wide_RV = _wide(logits_RV)
    shifted_RV = wide_RV - wide_RV.amax(-1, keepdim=True)
    ruled_out_RV = torch.isneginf(shifted_RV)
    expected_R = (shifted_RV.softmax(-1) * shifted_RV.masked_fill(ruled_out_RV, 0.0)).sum(-1)
    return shifted_RV.logsumexp(-1) - expected_R


class _Entropy(torch.autograd.Function):
    """Autograd would keep several tensors of the size of the logits for the backward pass; this keeps only the logits.

    d entropy / d logit = -p (log p + entropy).
    """

    @staticmethod
    def forward(ctx: Any, logits_NTV: torch.Tensor) -> torch.Tensor:
        flat_RV = logits_NTV.reshape(-1, logits_NTV.shape[-1])
        parts = [_entropy_rows(flat_RV[rows]) for rows in _blocks(flat_RV)]
        entropy_R = parts[0] if len(parts) == 1 else torch.cat(parts)
        ctx.save_for_backward(logits_NTV, entropy_R)
        return entropy_R.reshape(logits_NTV.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NT: torch.Tensor) -> torch.Tensor:
        logits_NTV, entropy_R = ctx.saved_tensors
        flat_RV, grad_R = logits_NTV.reshape(-1, logits_NTV.shape[-1]), grad_NT.reshape(-1)
        out_RV = torch.empty_like(flat_RV)
        for rows in _blocks(flat_RV):
            log_RV = _wide(flat_RV[rows]).log_softmax(-1)
            slope_RV = log_RV.exp() * (log_RV.masked_fill(torch.isneginf(log_RV), 0.0) + entropy_R[rows, None])
            out_RV[rows] = slope_RV.mul_(-grad_R[rows, None])
        return out_RV.reshape(logits_NTV.shape)


class _SelectedLogprobs(torch.autograd.Function):
    """Autograd would keep a float32 copy of half-precision logits for the backward pass; this keeps only the logits."""

    @staticmethod
    def forward(ctx: Any, logits_NTV: torch.Tensor, ids_NT: torch.Tensor) -> torch.Tensor:
        flat_RV, ids_R = logits_NTV.reshape(-1, logits_NTV.shape[-1]), ids_NT.reshape(-1)
        norm_R = torch.cat([_wide(flat_RV[rows]).logsumexp(-1) for rows in _blocks(flat_RV)])
        ctx.save_for_backward(logits_NTV, ids_R, norm_R)
        return (_wide(flat_RV.gather(-1, ids_R[:, None]).squeeze(-1)) - norm_R).reshape(ids_NT.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NT: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_NTV, ids_R, norm_R = ctx.saved_tensors
        flat_RV, grad_R = logits_NTV.reshape(-1, logits_NTV.shape[-1]), grad_NT.reshape(-1)
        out_RV = torch.empty_like(flat_RV)
        for rows in _blocks(flat_RV):
            block_RV = (_wide(flat_RV[rows]) - norm_R[rows, None]).exp_().mul_(-grad_R[rows, None])
            block_RV.scatter_add_(-1, ids_R[rows, None], grad_R[rows, None])
            out_RV[rows] = block_RV
        return out_RV.reshape(logits_NTV.shape), None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _blocks(flat_RV: torch.Tensor) -> Iterator[slice]:
    """Yield slices over the rows; at least one, even if there are no rows."""
    step = max(1, _CHUNK_ELEMENTS // max(1, flat_RV.shape[-1]))
    for first in range(0, max(1, flat_RV.shape[0]), step):
        yield slice(first, first + step)
