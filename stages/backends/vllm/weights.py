"""What a served model's weights must be, and how they get to the engine: as a file in memory, or where they lie on a
GPU. Knows no engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory

import msgspec
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline import StageError
from pipeline.errors import Problem
from stages.backends.snapshot import Handle

MEMORY = Path("/dev/shm")


@lru_cache(maxsize=1)
def expected(folder: Path, dtype: torch.dtype) -> dict[str, str]:
    """Dtype and shape of each weight of the model in a folder, a tied one under its first name."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    network.tie_weights()
    named = dict(network.named_parameters())
    persistent = network.state_dict().keys()
    named |= {name: buffer for name, buffer in network.named_buffers() if name in persistent}
    return {name: _shown(tensor) for name, tensor in named.items()}


def described(weights: Mapping[str, torch.Tensor] | Handle) -> dict[str, str]:
    """Dtype and shape of each weight that is given."""
    if isinstance(weights, Handle):
        return {entry.name: f"torch.{entry.dtype} {list(entry.shape)}" for entry in weights.entries}
    return {name: _shown(tensor) for name, tensor in weights.items()}


def check(wanted: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raise StageError naming the first weight that differs."""
    for name in sorted(wanted.keys() | given.keys()):
        has, gets = wanted.get(name, "no such tensor"), given.get(name, "no such tensor")
        if has != gets:
            raise StageError(
                Problem(
                    where=f"weight {name!r}",
                    what=f"this model has {has} and is given {gets}",
                    why="weights are loaded only into the same architecture and dtype",
                    fix="the same Model on both sides, on the same kind of device",
                )
            )


class WeightFile:
    """Weights as a safetensors file, in memory if there is room, which other processes of this user read by its path.

    `told` is what `Loader.sluice_load` is told of them. It has no name in a file system: it is gone when it is closed,
    and also when this process is killed.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        in_memory = MEMORY.is_dir() and disk_usage(MEMORY).free > 1.1 * size
        with TemporaryDirectory(dir=MEMORY if in_memory else None) as folder:
            path = Path(folder) / "weights.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
            self._handle = os.open(path, os.O_RDONLY)
        self.told = {"path": f"/proc/{os.getpid()}/fd/{self._handle}"}

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._handle)


class WeightsInPlace:
    """Weights that lie on a GPU of this machine, in memory that belongs to the trainer."""

    def __init__(self, handle: Handle) -> None:
        self.told = {"handle": msgspec.to_builtins(handle, builtin_types=(bytes,))}

    def close(self) -> None:
        """The memory is its owner's."""


Weights = WeightFile | WeightsInPlace


def _shown(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
