"""Two Triton kernels for ops.vocab_parallel: each reads a row of logits once, and computes in float32.

One program has one row. `sums` is the forward pass; `slopes_` overwrites the logits with their gradient.

Legend: R rows, one per token; V the vocabulary, or a rank's part of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

AT_ONCE = 4096  # logits
NEVER = tl.constexpr(-1e4)  # a logarithm whose exponential is 0
LOWEST = tl.constexpr(-1e30)  # below every logit, and finite: the difference of two is a number


@triton.jit
def _sums(logits, stride, ids, made, rows, size, scale, AT_ONCE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    lane = tl.arange(0, AT_ONCE)
    largest = LOWEST
    weight = tl.zeros((AT_ONCE,), tl.float32)
    expected = tl.zeros((AT_ONCE,), tl.float32)
    for first in range(0, size, AT_ONCE):
        inside = first + lane < size
        value = tl.load(here + first + lane, mask=inside, other=float("-inf")).to(tl.float32) * scale
        now = tl.maximum(largest, tl.max(value, 0))
        by = largest - now
        keep = tl.exp(by)
        shifted = tl.where(value != value, value, tl.maximum(value - now, NEVER))
        part = tl.where(inside, tl.exp(shifted), 0.0)
        expected = keep * (expected + tl.maximum(by, NEVER) * weight) + part * shifted
        weight = keep * weight + part
        largest = now
    own = tl.load(ids + row)
    mine = (own >= 0) & (own < size)
    chosen = tl.load(here + own, mask=mine, other=0.0).to(tl.float32) * scale
    tl.store(made + row, largest)
    tl.store(made + rows + row, tl.sum(weight, 0))
    tl.store(made + 2 * rows + row, tl.sum(expected, 0))
    tl.store(made + 3 * rows + row, chosen)


@triton.jit
def _slopes(logits, stride, ids, norm, entropy, by_logprob, by_entropy, size, scale, AT_ONCE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    lane = tl.arange(0, AT_ONCE)
    own = tl.load(ids + row)
    normal, spread = tl.load(norm + row), tl.load(entropy + row)
    one, other = tl.load(by_logprob + row), tl.load(by_entropy + row)
    for first in range(0, size, AT_ONCE):
        inside = first + lane < size
        log = tl.load(here + first + lane, mask=inside, other=float("-inf")).to(tl.float32) * scale - normal
        slope = -tl.exp(log) * (one + other * (tl.maximum(log, NEVER) + spread))
        slope += tl.where(first + lane == own, one, 0.0)
        tl.store(here + first + lane, (slope * scale).to(logits.dtype.element_ty), mask=inside)


def sums(logits_RV: torch.Tensor, own_R: torch.Tensor, scale: float) -> torch.Tensor:
    """Return four numbers per row, [4, R] float32, of z = logits * scale: the largest z; the sums of w and of
    w * (z - largest) over the row, w = exp(z - largest); and z of the token `own`, 0 if the row does not have it.

    A logit of -inf excludes a token. `own_R` is int64; each row is contiguous."""
    made = torch.empty(4, len(logits_RV), dtype=torch.float32, device=logits_RV.device)
    if len(logits_RV):
        given = (logits_RV, logits_RV.stride(0), own_R, made, len(logits_RV), logits_RV.shape[1], scale)
        _sums[(len(logits_RV),)](*given, AT_ONCE=AT_ONCE, num_warps=8)
    return made


def slopes_(
    logits_RV: torch.Tensor, own_R: torch.Tensor, norm_R: torch.Tensor, entropy_R: torch.Tensor,
    by_logprob_R: torch.Tensor, by_entropy_R: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Overwrite logits with the gradient of by_logprob * logprob + by_entropy * entropy, and return them. `norm_R` is
    the logarithm of the sum of exp(z); all [R] are float32, `own_R` is int64."""
    if len(logits_RV):
        numbers = (norm_R, entropy_R, by_logprob_R, by_entropy_R)
        given = (logits_RV, logits_RV.stride(0), own_R, *(each.contiguous() for each in numbers), logits_RV.shape[1])
        _slopes[(len(logits_RV),)](*given, scale, AT_ONCE=AT_ONCE, num_warps=8)
    return logits_RV
