"""The most that queries, keys and values of each layer of a model can be, from its weights (ops/cache_scale.py).

    bounds_of(read, ["model.layers.0.self_attn.k_proj.weight", ...], amplitude=1.0)     # {0: (q, k, v), ...}

This is attention with one norm before the projections, maybe one of each head after them, maybe a rotation of pairs,
and nothing else before the cache (vllm/limits.py lists the families).

Knows the names of tensors in Hugging Face folders, plain or quantized as in blocks.py; no engine. A rank that holds
some heads computes the bounds of these, and the largest over the ranks are those of the model: the same for every
division.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from ops.cache_scale import head_bound, rotated, row_bound
from ops.quantize import BLOCK, dequantized
from stages.backends.model.blocks import SUFFIX

Bounds: TypeAlias = dict[int, tuple[float, float, float]]  # of queries, keys and values, by the number of the layer
Read: TypeAlias = Callable[[str], torch.Tensor | None]  # a tensor, or a rank's rows of it; None if there is none

NORMS = ("input_layernorm", "norm")  # before the projections: Llama's name, and NemotronH's
_KEYS = re.compile(r"(?P<layer>.*\blayers\.(?P<number>\d+)\.)(?P<part>\w+\.)k_proj\.weight")
_ROWS = 8 * BLOCK  # of a quantized matrix that are converted at once


@torch.no_grad()
def bounds_of(read: Read, names: Iterable[str], *, amplitude: float) -> Bounds:
    """Return the bounds of each layer with attention among the tensors `names`. `amplitude` is the factor of the
    cosines and sines of its rotary embedding (YaRN's; 1 otherwise).

    Raises KeyError if a tensor that a bound needs is missing.
    """
    found = {int(match["number"]): match for name in names if (match := _KEYS.fullmatch(name))}
    if not found:
        return {}
    rows = [_bounds(read, match["layer"], match["layer"] + match["part"], amplitude) for match in found.values()]
    queries_keys_values = torch.stack([torch.stack(row) for row in rows]).tolist()  # one wait for the device
    return {number: (q, k, v) for number, (q, k, v) in zip(found, queries_keys_values)}


def largest(ranks: Sequence[Mapping[int, tuple[float, float, float]]]) -> Bounds:
    """Return the bounds of a model from those of its ranks' parts."""
    numbers = sorted({number for rank in ranks for number in rank})
    rows = {number: zip(*(rank[number] for rank in ranks if number in rank)) for number in numbers}
    made: Bounds = {}
    for number, columns in rows.items():
        q, k, v = (max(column) for column in columns)
        made[number] = (q, k, v)
    return made


def _bounds(read: Read, layer: str, at: str, amplitude: float) -> list[torch.Tensor]:
    gain_D = next((gain for norm in NORMS if (gain := read(f"{layer}{norm}.weight")) is not None), None)
    if gain_D is None:
        raise KeyError(f"{layer}{NORMS[0]}.weight")
    made = []
    for letter in "qk":
        own = read(f"{at}{letter}_norm.weight")
        made.append(
            amplitude * (rotated(_rows(read, f"{at}{letter}_proj", gain_D)) if own is None else head_bound(own))
        )
    return [*made, _rows(read, f"{at}v_proj", gain_D)]


def _rows(read: Read, module: str, gain_D: torch.Tensor) -> torch.Tensor:
    weight_RD, bias_R, scale_IJ = (read(f"{module}.{own}") for own in ("weight", "bias", f"weight{SUFFIX}"))
    if weight_RD is None:
        raise KeyError(f"{module}.weight")
    if scale_IJ is None:
        return row_bound(weight_RD, gain_D, bias_R)
    biases = weight_RD.split(_ROWS) if bias_R is None else bias_R.split(_ROWS)
    parts = zip(weight_RD.split(_ROWS), scale_IJ.split(_ROWS // BLOCK), biases)
    return torch.stack(
        [
            row_bound(dequantized(part_RD, part_IJ), gain_D, None if bias_R is None else part_R)
            for part_RD, part_IJ, part_R in parts
        ]
    ).max()
