"""Where a rank holds the tensors of a transformers network, for a refit or an export. Knows modules and names.

    tensors, places, held = placed(network, torch.bfloat16)     # `held` are the rank's own tensors, by buffer

Names are those of the folder of the model. The state of the network has the same, except for the experts of a layer,
which transformers stores in two tensors, and for NemotronH, whose folder has another prefix. A tied tensor appears
once, under its first name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ops.refit.layout import Box, Place, Tensor, dense
from pipeline.declare.saved_model import Piece, Pieces
from stages.backends.model.names import in_folder
from stages.backends.model.precision import kept_dtype
from stages.backends.model.weights import state

Placed: TypeAlias = tuple[dict[str, Tensor], list[Place], dict[str, torch.Tensor]]
GATE_UP, UP, DOWN = ".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"


def placed(network: nn.Module, dtype: torch.dtype | None = None) -> Placed:
    """All tensors of the network, the places of this rank's part, and that part. `dtype` is the dtype in which
    floating-point tensors are offered; None keeps theirs."""
    tensors: dict[str, Tensor] = {}
    places: list[Place] = []
    held: dict[str, torch.Tensor] = {}
    found = state(network)
    for name, tensor in found.items():
        kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        if own := kept_dtype(name):
            kind = getattr(torch, own)
        held[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        divide = _parts if _is_divided(name, found) else _same
        for of_state, shape, place in divide(name, tuple(tensor.shape), _own(tensor), kind.itemsize):
            part = in_folder(network, of_state)
            place = replace(place, tensor=part)
            tensors[part] = Tensor(shape, str(kind).removeprefix("torch."))
            if held[name].numel():
                places.append(place)
    return tensors, places, held


def _own(tensor: torch.Tensor) -> Box:
    """The box that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((start, start + size) for start, size in zip(starts, sizes))


def _parts(
    name: str, shape: tuple[int, ...], own: Box, item_bytes: int
) -> Iterator[tuple[str, tuple[int, ...], Place]]:
    """The model tensors inside a state tensor, with their shapes and positions."""
    layer, _, matrix = name.partition("experts.")
    if not name.endswith(GATE_UP):
        part = f"{layer}experts.*.{matrix}.weight"
        yield part, shape, dense(part, own, item_bytes, name)
    else:
        experts, both, hidden = shape
        strides = (item_bytes * both * hidden, item_bytes * hidden, item_bytes)
        for i, kind in enumerate(("gate", "up")):
            part, half = f"{layer}experts.*.{kind}_proj.weight", both // 2
            place = Place(part, (own[0], (0, half), (0, hidden)), name, i * half * strides[1], strides)
            yield part, (experts, half, hidden), place


def _same(name: str, shape: tuple[int, ...], own: Box, item_bytes: int) -> Iterator[tuple[str, tuple[int, ...], Place]]:
    """A state tensor that is the model's."""
    yield name, shape, dense(name, own, item_bytes, name)


def _is_divided(name: str, found: Mapping[str, torch.Tensor]) -> bool:
    """Whether a state tensor has the experts of a layer, which a folder has apart. Those with a bias (gpt-oss) are in a
    folder as in the network."""
    return name.endswith((DOWN, UP, GATE_UP)) and f"{name}_bias" not in found


def pieces(network: nn.Module, file: str) -> dict[str, Pieces]:
    """Where the tensors of the model's Hugging Face folder lie in a file with the network's state."""
    found: dict[str, Pieces] = {}
    state_of = state(network)
    for name, tensor in state_of.items():
        divided = _is_divided(name, state_of)
        shape_of = tuple(tensor.shape)
        for part, shape, at in _published(name, shape_of) if divided else ((name, shape_of, 0),):
            box = tuple((0, size) for size in shape)
            found[in_folder(network, part)] = Pieces(
                shape=shape, pieces=(Piece(file=file, tensor=name, at=at, box=box),)
            )
    return found


def _published(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """The folder's tensors inside a state tensor: name, shape and first element."""
    layer, _, matrix = name.partition("experts.")
    experts, rows, columns = shape
    kinds = ("gate", "up") if name.endswith(GATE_UP) else (matrix.removesuffix("_proj"),)
    share = rows // len(kinds)
    for expert in range(experts):
        for i, kind in enumerate(kinds):
            at = (expert * rows + i * share) * columns
            yield f"{layer}experts.{expert}.{kind}_proj.weight", (share, columns), at
