"""Rotary embeddings by position: frequencies as transformers computes them. Knows no layers.

Legend: S positions, N samples, H heads, D dimensions that are turned.
"""

from __future__ import annotations

import math

import torch

from stages.backends.model.decoder import Llama3Rope, Rope, Yarn


def frequencies(rope: Rope) -> torch.Tensor:
    """Frequencies [D / 2], in radians per position."""
    exponent = torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims
    plain = 1.0 / (rope.base**exponent)
    match rope.scaling:
        case None:
            return plain
        case Llama3Rope() as scaling:
            wave = 2 * math.pi / plain
            mix = ((scaling.original / wave - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        case Yarn() as scaling:
            first, last = _bounds(rope, scaling)
            ramp = (torch.arange(rope.dims // 2, dtype=torch.float32) - first) / (last - first)
            mix = 1 - ramp.clamp(0.0, 1.0)
    return (1 - mix) * plain / scaling.factor + mix * plain


def _bounds(rope: Rope, scaling: Yarn) -> tuple[float, float]:
    """The dimensions up to which frequencies stay, and from which they are divided."""

    def turning(times: float) -> float:
        """The dimension that turns this often in the original positions."""
        return rope.dims * math.log(scaling.original / (times * 2 * math.pi)) / (2 * math.log(rope.base))

    first, last = turning(scaling.fast), turning(scaling.slow)
    if scaling.truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dims - 1)
    return first, last + 0.001 if first == last else last


def turned(
    values_SNHD: torch.Tensor, angles_SD: torch.Tensor, *, amplitude: float = 1.0, interleaved: bool = False
) -> torch.Tensor:
    """Values turned by angles [S, 1, 1, D], whose halves are equal. Of `interleaved` values a pair is two neighbors;
    the result has the first of all pairs, then the second."""
    if interleaved:
        values_SNHD = torch.cat([values_SNHD[..., 0::2], values_SNHD[..., 1::2]], dim=-1)
    first, second = values_SNHD.chunk(2, dim=-1)
    cosine, sine = ((part * amplitude).to(values_SNHD.dtype) for part in (angles_SD.cos(), angles_SD.sin()))
    return values_SNHD * cosine + torch.cat([-second, first], dim=-1) * sine
