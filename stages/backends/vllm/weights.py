"""What a served model's weights must be, and how they get to the engine: as a file. Knows no engine.

The file lies in memory where the machine has a file system for that (/dev/shm), and is read by each rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline import StageError
from pipeline.errors import Problem

MEMORY = Path("/dev/shm")


def expected(folder: Path, dtype: torch.dtype) -> dict[str, str]:
    """Dtype and shape of each weight of the model in a folder, a tied one under its first name."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    network.tie_weights()
    named = dict(network.named_parameters())
    persistent = network.state_dict().keys()
    named |= {name: buffer for name, buffer in network.named_buffers() if name in persistent}
    return {name: _shown(tensor) for name, tensor in named.items()}


def check(wanted: Mapping[str, str], given: Mapping[str, torch.Tensor]) -> None:
    """Raise StageError naming the first weight that differs."""
    for name in sorted(wanted.keys() | given.keys()):
        has, gets = wanted.get(name, "no such tensor"), _shown(given[name]) if name in given else "no such tensor"
        if has != gets:
            raise StageError(
                Problem(
                    where=f"weight {name!r}",
                    what=f"this model has {has} and is given {gets}",
                    why="weights are loaded only into the same architecture and dtype",
                    fix="the same Model on both sides, on the same kind of device",
                )
            )


def write(weights: Mapping[str, torch.Tensor]) -> Path:
    """The weights as a new safetensors file, which the caller removes."""
    folder = MEMORY if MEMORY.is_dir() else None
    with tempfile.NamedTemporaryFile(prefix="sluice-", suffix=".safetensors", dir=folder, delete=False) as file:
        path = Path(file.name)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    return path


def _shown(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
