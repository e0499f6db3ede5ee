"""Scales of a cache of 8-bit floats (e4m3), from weights alone: no key, value or query that is scaled so saturates.

    scale = power_of_two(rotated(row_bound(weight_RD, gain_D, bias_R)))     # of the keys of a layer without norms
    scale = power_of_two(head_bound(gain_H))                                # of one that normalizes each head

What a projection reads is x = g u, with the gain g of RMSNorm (Zhang and Sennrich, Root Mean Square Layer
Normalization, 2019, arXiv 1910.07467), and the norm of u is at most sqrt(D), since its mean square is at most 1. So by
Cauchy and Schwarz |w x + b| <= sqrt(D) |w g| + |b|, whatever the tokens are. Where heads are normalized again (as in
Qwen3), the norm of a head is at most sqrt(H) max |g|. A rotary embedding (arXiv 2104.09864) turns pairs of elements:
each is then at most sqrt(2) times the larger one, and the norm of a head stays.

Such a bound is loose: a typical value is 1 / sqrt(D) of it. That costs no precision. An 8-bit float has 4 significant
bits from 2^-6 to 448, a range of 2^14.8, so with margin and rounding a value may be 2^13 smaller than the bound and is
as precise as any; sqrt(4096) is 2^6. Smaller values have an error of at most 2^-10 times the scale, 2^-17 of the
bound. A scale is a power of two: it moves exponents and rounds nothing, and hardly ever depends on the order in which a
bound was summed (tests/unit/test_cache_scale.py).

Legend: R rows of a projection, D hidden size, H size of a head.
"""

from __future__ import annotations

import math

import torch

from ops.quantize import LARGEST

# Activations are rounded between these formulas: to 8 bits before a product with 8-bit weights (1/16), and to bfloat16
# after a norm, a product and a rotation (1/256 each).
MARGIN = 1.125
_CHUNK = 1 << 22  # elements that are converted at once: float64 copies stay small


@torch.no_grad()
def row_bound(weight_RD: torch.Tensor, gain_D: torch.Tensor, bias_R: torch.Tensor | None = None) -> torch.Tensor:
    """Return the most that an element of `weight @ (gain * u) + bias` can be, float64, for any u with a mean square of
    at most 1."""
    size, squares_D = weight_RD.shape[1], gain_D.double().square()
    parts = weight_RD.split(max(1, _CHUNK // size))
    bound_R = torch.cat([part.double().square() @ squares_D for part in parts]).sqrt() * math.sqrt(size)
    if bias_R is not None:
        bound_R = bound_R + bias_R.double().abs()
    return bound_R.max()


@torch.no_grad()
def head_bound(gain_H: torch.Tensor) -> torch.Tensor:
    """Return the most that the norm of a normalized head, and so any element of it, can be, float64; also after a
    rotation."""
    return gain_H.double().abs().max() * math.sqrt(len(gain_H))


def rotated(bound: torch.Tensor) -> torch.Tensor:
    """Return the bound of elements after a rotation of pairs of them."""
    return bound * math.sqrt(2)


def power_of_two(bound: float) -> float:
    """Return the smallest power of two by which numbers of at most `bound`, with a margin for rounding, are divided to
    be at most 448. It is 1 where there is nothing to scale: for a bound of 0, and one that is not finite."""
    if not 0 < bound < math.inf:
        return 1.0
    mantissa, exponent = math.frexp(bound * MARGIN / LARGEST)  # in 0.5 to 1
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
