"""Which kernels that do several operations at once a network uses on this machine. Knows packages and devices."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

from ops.kernels import has_triton
from stages.backends.megatron.groups import Groups


@dataclass(frozen=True)
class Fused:
    """On a CPU all are off.

    layers      norms and matrix products of Transformer Engine
    attention   its attention over packed rows, which needs no copies of key-value heads
    rope        its rotary embedding
    gradients   its matrix products add a weight's gradient to the float32 sum themselves
    activation  SwiGLU in one kernel, forward and backward, which torch compiles with Triton
    scan        the kernels of mamba-ssm and causal-conv1d
    experts     one layer multiplies the tokens of all experts of a rank (grouped GEMM), Transformer Engine's
    """

    layers: bool = False
    attention: bool = False
    rope: bool = False
    gradients: bool = False
    activation: bool = False
    experts: bool = False
    scan: bool = False


@cache
def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def fused_on(groups: Groups) -> Fused:
    """What this rank's device and packages have."""
    if groups.device.type != "cuda":
        return Fused()
    engine = _has("transformer_engine")
    return Fused(
        layers=engine,
        attention=engine,
        rope=engine,
        gradients=engine,
        activation=has_triton(),
        experts=engine,
        scan=_has("mamba_ssm") and _has("causal_conv1d"),
    )
