"""Weights as plain CPU tensors by name, and their hash. Knows modules and bytes; it does not know who needs them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from pipeline import StageError
from pipeline.errors import Problem


def weights(network: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers on the CPU, by name, copied. Of tied tensors the first name only."""
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in _tensors(network).items()}


@torch.no_grad()
def load_weights(network: nn.Module, new: Mapping[str, torch.Tensor]) -> None:
    """Copy `new` into the network in place, so that ties stay. Names, shapes and dtypes must be those of `weights`.

    Raises StageError, before anything is copied, naming the first tensor that differs.
    """
    held = _tensors(network)
    for name in sorted(held.keys() | new.keys()):
        if _shown(held.get(name)) != _shown(new.get(name)):
            raise StageError(
                Problem(
                    where=f"weight {name!r}",
                    what=f"this model has {_shown(held.get(name))} and is given {_shown(new.get(name))}",
                    why="weights are loaded only into the same architecture and dtype",
                    fix="the same Model on both sides, on the same kind of device",
                )
            )
    for name, tensor in new.items():
        held[name].copy_(tensor)


def weight_hash(named: Mapping[str, torch.Tensor]) -> str:
    """sha256 over name, dtype, shape and bytes of each tensor, in order of the names."""
    digest = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name].detach().to("cpu").contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def _tensors(network: nn.Module) -> dict[str, torch.Tensor]:
    """The live tensors of the state, a tied one under its first name."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = {}
    for name, tensor in network.state_dict().items():
        identity = (tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.numel() or identity not in seen:
            found[name] = tensor.detach()
        seen.add(identity)
    return found


def _shown(tensor: torch.Tensor | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
