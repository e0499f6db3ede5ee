"""Where a Megatron rank holds the model's tensors: its table of names as boxes in memory. Arithmetic only.

    layout = Layout(tensors(decoder, "bfloat16"), [places(decoder, part, 2) for part in parts])

A buffer is a contiguous parameter, by Megatron-core's name.
"""

from __future__ import annotations

from math import prod

from ops.refit.layout import ITEM_BYTES, Place, Tensor
from stages.backends.megatron.names import parameters
from stages.backends.megatron.parts import Part
from stages.backends.model.decoder import Decoder
from stages.backends.model.experts import of_expert


def tensors(decoder: Decoder, dtype: str) -> dict[str, Tensor]:
    """All tensors of the model, with a layer's experts stacked."""
    found: dict[str, Tensor] = {}
    for parameter in parameters(decoder, Part()).values():
        for piece in parameter.pieces:
            name, expert = of_expert(piece.name)
            shape = piece.shape if expert is None else (decoder.experts, *piece.shape)
            found[name] = Tensor(shape, parameter.dtype or dtype)
    return found


def places(decoder: Decoder, part: Part, item_bytes: int) -> list[Place]:
    """The places that a rank holds. Padding belongs to no place."""
    found: list[Place] = []
    for buffer, parameter in parameters(decoder, part).items():
        own_bytes = ITEM_BYTES[parameter.dtype] if parameter.dtype else item_bytes
        strides = tuple(own_bytes * prod(parameter.shape[i + 1 :]) for i in range(len(parameter.shape)))
        row_bytes = strides[0]
        for piece in parameter.pieces:
            name, expert = of_expert(piece.name)
            box = (piece.rows, *((0, size) for size in piece.shape[1:]))
            box = box if piece.columns is None else (piece.rows, piece.columns)
            if expert is None:
                found.append(Place(name, box, buffer, piece.at * row_bytes, strides))
            else:
                own = (row_bytes * parameter.shape[0], *strides)  # one expert per parameter: no stride over experts
                found.append(Place(name, ((expert, expert + 1), *box), buffer, piece.at * row_bytes, own))
    return found
