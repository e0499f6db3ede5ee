"""Weights by name. Knows modules and bytes, not what uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline import StageError
from pipeline.errors import Problem
from stages.backends.model.adapters import is_adapter
from stages.backends.model.precision import kept_dtype
from stages.backends.model.sharded import like, whole


def weights(network: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Copies of parameters and persistent buffers on the CPU, by name; tied tensors under their first name only.

    Floating-point weights are rounded to `dtype`; None keeps theirs. For a sharded network every rank gets full
    tensors, and all ranks must call it.
    """
    return {name: tensor.to("cpu", copy=True) for name, tensor in live_weights(network, dtype)}


def live_weights(network: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The same one at a time, in place; copied only if sharded or of another dtype."""
    for name, tensor in state(network).items():
        wanted = dtype if dtype and tensor.is_floating_point() and not kept_dtype(name) else tensor.dtype
        yield name, whole(tensor).to(wanted).contiguous()


@torch.no_grad()
def load_weights(network: nn.Module, new: Mapping[str, torch.Tensor]) -> None:
    """Copy `new` into the network in place, preserving ties. Names, shapes and dtypes must match `weights`.

    Raises StageError before copying anything, naming the first tensor that differs.
    """
    held = state(network)
    for name in sorted(held.keys() | new.keys()):
        if _shown(held.get(name)) != _shown(new.get(name)):
            raise StageError(
                Problem(
                    where=f"weight {name!r}",
                    what=f"this model has {_shown(held.get(name))} and received {_shown(new.get(name))}",
                    why="weights load only into the same architecture and dtype",
                    fix="the same Model on both sides, on the same kind of device",
                )
            )
    for name, tensor in new.items():
        held[name].copy_(like(tensor, held[name]))


def state(network: nn.Module) -> dict[str, torch.Tensor]:
    """The live tensors of a network's state; a tied one under its first name. Of a network with adapters, only these:
    nothing else changes."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = {}
    held = network.state_dict(keep_vars=True)
    for name, tensor in ({name: held[name] for name in held if is_adapter(name)} or held).items():
        nowhere = isinstance(tensor, DTensor) or tensor.is_meta
        identity = (id(tensor) if nowhere else tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.numel() or identity not in seen:
            found[name] = tensor.detach()
        seen.add(identity)
    return found


def _shown(tensor: torch.Tensor | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
