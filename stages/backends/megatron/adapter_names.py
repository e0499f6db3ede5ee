"""The parameters of an adapter on a Megatron rank, from those of the layers that it belongs to. Arithmetic only.

The adapter of a layer is inside it, as `linear_qkv.adapter.targets.q_proj.lora_A.weight`, and consists of the tensors
that the torch backend has, `self_attn.q_proj.lora_A.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.lora import A, B, LoRA

if TYPE_CHECKING:
    from stages.backends.megatron.names import Parameter


def adapter_parameters(base: Mapping[str, Parameter], lora: LoRA) -> dict[str, Parameter]:
    """The adapter's parameters on the rank that has the parameters `base`. `lora` lists its targets. Where ranks divide
    a layer's outputs, they divide the rows of B in the same way; where inputs, the columns of A; otherwise neither."""
    made: dict[str, Parameter] = {}
    for name, parameter in base.items():
        for tensor in dict.fromkeys(piece.name for piece in parameter.pieces):
            layer, _, kind = tensor.rpartition(".")
            end = layer.rpartition(".")[2]
            if parameter.expert or parameter.copy or kind != "weight" or end not in lora.targets:
                continue
            pieces = sorted((piece for piece in parameter.pieces if piece.name == tensor), key=lambda piece: piece.at)
            (outputs, inputs), columns = pieces[0].shape, pieces[0].columns
            rows, taken = [], 0
            for piece in pieces:
                rows.append(type(piece)(f"{layer}.{B}", (outputs, lora.rank), piece.rows, None, taken))
                taken += piece.rows[1] - piece.rows[0]
            a = type(pieces[0])(f"{layer}.{A}", (lora.rank, inputs), (0, lora.rank), columns, 0)
            width = inputs if columns is None else columns[1] - columns[0]
            path = f"{name.removesuffix('.weight')}.adapter.targets.{end}"
            made[f"{path}.{A}"] = type(parameter)((lora.rank, width), (a,), None if columns is None else 1)
            divided = 0 if parameter.divided == 0 else None
            made[f"{path}.{B}"] = type(parameter)((taken, lora.rank), tuple(rows), divided)
    return made
