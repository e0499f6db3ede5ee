"""Low-rank adapters inside a transformers network. Knows modules and names; trains nothing itself.

    network = sharing(base)                          # its own modules, the same tensors
    attach(network, LoRA(rank=16), seed=0, where="graph.py:7")

An adapter is two tensors per layer, `q_proj.lora_A.weight` [rank, inputs] and `q_proj.lora_B.weight` [outputs, rank].
PEFT puts `PEFT` before these names. A network with adapters is known by them alone: `weights.state` then has no other
tensors, so refits, checkpoints and exports carry only the adapter.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from stages.backends.model.names import in_folder
from stages.lora import A, B, LoRA

PEFT = "base_model.model."
CONFIG = "adapter_config.json"

N = TypeVar("N", bound=nn.Module)


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter. It has the layer's own weight and bias, under the same names."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scaling = base.weight, base.bias, scaling
        kind: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **kind)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """W x + b + scaling B A x."""
        return functional.linear(x, self.weight, self.bias) + self.scaling * self.lora_B(self.lora_A(x))


def sharing(network: N) -> N:
    """A copy of the modules that shares all parameters and buffers."""
    shared = {id(tensor): tensor for tensor in chain(network.parameters(), network.buffers())}
    return copy.deepcopy(network, shared)


def attach(network: PreTrainedModel, lora: LoRA, *, seed: int, where: str) -> None:
    """Freeze the network and give its layers adapters, in place. Raises StageError for a target that no layer has."""
    network.requires_grad_(False)
    layers = {name: module for name, module in network.named_modules() if type(module) is nn.Linear}
    wanted = lora.layers(network.config.model_type, sorted({_end(name) for name in layers}), where)
    for name, layer in layers.items():
        if _end(name) in wanted:
            parent, _, end = name.rpartition(".")
            adapted = AdaptedLinear(layer, lora.rank, lora.scaling)
            with torch.no_grad():
                adapted.lora_B.weight.zero_()
                if not layer.weight.is_meta:
                    first = first_a(in_folder(network, f"{name}.{A}"), adapted.lora_A.weight.shape, seed)
                    adapted.lora_A.weight.copy_(first)
            setattr(network.get_submodule(parent), end, adapted)


def first_a(name: str, shape: Iterable[int], seed: int) -> torch.Tensor:
    """The first value of a matrix A: uniform between -1 and 1 over the root of its inputs, as PEFT draws it. It depends
    on the seed and the tensor's name in a folder only, so each rank draws the whole and keeps its part."""
    rows, columns = shape
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(rows, columns).uniform_(-1, 1, generator=random) / math.sqrt(columns)


def is_adapter(name: str) -> bool:
    """Whether a tensor's name is that of an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def write_adapter_config(lora: LoRA, layers: Iterable[str], base: str, folder: Path) -> None:
    """Write PEFT's configuration into an existing folder. `base` is the folder or hub name of the model."""
    (folder / CONFIG).write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": base,
                "r": lora.rank,
                "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
                "lora_dropout": 0.0,
                "target_modules": sorted(layers),
                "bias": "none",
                "fan_in_fan_out": False,
                "use_rslora": False,
                "inference_mode": True,
            },
            indent=2,
        )
        + "\n"
    )


def read_adapter_config(folder: Path) -> LoRA | None:
    """Return the adapter of a folder that `write_adapter_config` wrote into, its targets by name; None if it has a
    whole model. Raises OSError, ValueError, LookupError or TypeError if its configuration cannot be read."""
    if not (folder / CONFIG).exists():
        return None
    config = json.loads((folder / CONFIG).read_bytes())
    return LoRA(rank=config["r"], alpha=config["lora_alpha"], targets=tuple(sorted(config["target_modules"])))


def _end(name: str) -> str:
    return name.rpartition(".")[2]
