"""Scales of vLLM's cache of 8-bit keys and values (`WorkerGroup(cache="fp8")`), set in a worker at start and after each
refit. Where the bounds come from: stages/backends/model/cache_bounds.py.

vLLM 0.26 and 0.32 leave these scales at 1, and both set them back to 1 when an attention layer is loaded again, 0.26
also when an engine wakes up. (0.26 can measure them once, in the first pass of an engine, with `calculate_kv_scales`; a
refit would leave them as they are, and 0.32 does not have it.) What reads them, in both versions:

    FLASH_ATTN    `_k_scale` and `_v_scale` when keys and values are written and read, `_q_scale` when queries are
                  rounded to 8 bits before the layer (FlashAttention 3 multiplies 8-bit floats) and read
    TRITON_ATTN   the same
    CPU_ATTN      `_k_scale_float` and `_v_scale_float`, in every call; the CPU build has no CUDA graphs
    FLASHINFER    the numbers, which CUDA graphs keep as they were when they were captured: refused

The tensors are buffers of the layer. CUDA graphs and compiled code hold their addresses, so they are written in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ops.cache_scale import power_of_two
from stages.backends.model.cache_bounds import Bounds, bounds_of
from stages.backends.model.shards import Shards

KINDS = ("q", "k", "v")  # in the order of `Bounds`
READ_IN_PLACE = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")  # attention backends
# Adapters of several versions share a cache, so their scales stay those of the base weights. Rows of values that an
# adapter lengthens to at most twice the longest row of the layer are still within them; norms of heads have no adapter.
ADAPTED = 2.0
_NUMBER = re.compile(r"\blayers\.(\d+)\.")


def cached_layers(layers: Iterable[tuple[str, nn.Module]]) -> dict[int, Any]:
    """The attention layers by number, from their names. Raises ValueError if two have the same number."""
    found: dict[int, Any] = {}
    for name, layer in layers:
        number = int(match[1]) if (match := _NUMBER.search(name)) else -1
        if number < 0 or number in found:
            raise ValueError(f"the attention layer {name!r} has no number of its own")
        found[number] = layer
    return found


def not_in_place(layers: Mapping[int, Any]) -> str:
    """The attention backend that would not see new scales; "" if there is none."""
    names = {str(layer.attn_backend.get_name()) for layer in layers.values()}
    return next(iter(sorted(names - {*READ_IN_PLACE})), "")


def amplitude(network: nn.Module) -> float:
    """The largest factor by which a rotary embedding lengthens a pair of elements; 1 without one."""
    found: list[Any] = [module for module in network.modules() if hasattr(module, "cos_sin_cache")]
    cosines_sines = [module.cos_sin_cache.float().chunk(2, dim=-1) for module in found]
    return max([1.0, *(float((cos.square() + sin.square()).max().sqrt()) for cos, sin in cosines_sines)])


def folder_bounds(folder: Path, rank: int, ranks: int, factor: float, device: torch.device) -> Bounds:
    """The bounds of each `ranks`-th layer of a model folder, computed on a device. `factor` is `amplitude`'s."""
    shards = Shards(folder)

    def read(name: str) -> torch.Tensor | None:
        found = shards.whole(name)
        return None if found is None else found.to(device)

    keys = sorted(name for name in shards.files if name.endswith(".k_proj.weight"))
    return bounds_of(read, keys[rank::ranks], amplitude=factor)


def scales_of(bounds: Bounds, growth: float = 1.0) -> Bounds:
    """The scales of a model's layers. `growth` multiplies the bounds."""
    made: Bounds = {}
    for number, each in bounds.items():
        q, k, v = (power_of_two(growth * bound) for bound in each)
        made[number] = (q, k, v)
    return made


def record_of(scales: Bounds) -> dict[str, float]:
    """The smallest and the largest scale of queries, keys and values over the layers, as metrics of a refit."""
    columns = dict(zip(KINDS, zip(*scales.values())))
    return {
        f"cache_scale_{kind}_{name}": float(pick(column))
        for kind, column in columns.items()
        for name, pick in (("min", min), ("max", max))
    }


@torch.no_grad()
def install(layers: Mapping[int, Any], scales: Mapping[int, tuple[float, float, float]]) -> None:
    """Give each attention layer its scales, in place. Raises ValueError, and changes nothing, if one has none."""
    if missing := sorted(layers.keys() - scales.keys()):
        raise ValueError(f"the attention of layer {missing[0]} has no scales; there are those of {sorted(scales)}")
    for number, layer in layers.items():
        q, k, v = scales[number]
        if layer.query_quant is not None:  # otherwise queries keep their format
            layer._q_scale.fill_(q)
            layer._q_scale_float = q
        for held in (layer._k_scale, layer._k_scale_cpu):
            held.fill_(k)
        for held in (layer._v_scale, layer._v_scale_cpu):
            held.fill_(v)
        layer._k_scale_float, layer._v_scale_float = k, v
