"""Low-rank adapters beside Megatron-core's divided layers, so that ranks together compute what one rank does.

    attach(network, lora, family="qwen3", seed=0, where="graph.py:7")

That freezes the network; from then on its table names the adapter's tensors.

A layer that divides its outputs (queries, keys, values, gate, up) has A whole on every rank and its rows of B; one that
divides its inputs has its columns of A and B whole; one that every rank holds, of latent attention, has both whole.
What a rank computes of the small product A x is exchanged along the sequence, as Megatron-core exchanges the layer's
own. Gradients of whole matrices, which each rank has for its share of the sequence, are summed over the ranks by
Megatron-core (`sequence_parallel`).

Legend: S positions, N samples, I inputs, R rank of the adapter, O outputs, all of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import nn
from torch.nn import functional

from stages.backends.megatron.names import Parameter, parameters
from stages.backends.megatron.parts import Part
from stages.backends.model.adapters import first_a
from stages.lora import A, B, LoRA

if TYPE_CHECKING:
    from stages.backends.megatron.network import Network


class TargetAdapter(nn.Module):
    """This rank's part of the matrices of one target."""

    def __init__(self, sizes: tuple[int, int, int], kind: dict[str, Any]) -> None:
        super().__init__()
        inputs, rank, outputs = sizes
        self.lora_A = nn.Linear(inputs, rank, bias=False, **kind)
        self.lora_B = nn.Linear(rank, outputs, bias=False, **kind)


class LayerAdapter(nn.Module):
    """The adapters of one layer of Megatron-core, which may hold several layers of the model, interleaved.

    `rows` are the runs of its outputs: of which target each is, None without one, and its length. `divides_inputs` is
    whether tensor-parallel ranks divide inputs instead of outputs; `group` is theirs, None if they divide neither.
    """

    def __init__(
        self, targets: Mapping[str, TargetAdapter], rows: list[tuple[str | None, int]], scaling: float, *,
        divides_inputs: bool, group: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.targets = nn.ModuleDict(targets)
        self.rows, self.scaling, self.divides_inputs, self.group = rows, scaling, divides_inputs, group
        self.is_on = True

    def forward(self, x_SNI: torch.Tensor, made_SNO: torch.Tensor) -> torch.Tensor:
        """The layer's outputs, with what the adapters add to them. The targets are one product: each reads its own part
        of A x, so the other parts of its rows of B are zero."""
        matrices: list[Any] = list(self.targets.values())
        small_SNR = functional.linear(x_SNI, torch.cat([each.lora_A.weight for each in matrices]))
        if self.group is not None:
            exchange = (
                reduce_scatter_to_sequence_parallel_region
                if self.divides_inputs
                else gather_from_sequence_parallel_region
            )
            small_SNR = exchange(small_SNR, group=self.group)
        small_SNR = self.scaling * small_SNR
        added = torch.addmm(made_SNO.flatten(0, 1), small_SNR.flatten(0, 1), self._whole_b().t())
        return added.view_as(made_SNO)

    def _whole_b(self) -> torch.Tensor:
        """Rows of all outputs, columns of all targets."""
        spread: dict[str, torch.Tensor] = {}
        matrices: dict[str, Any] = dict(self.targets.items())
        before, width = 0, sum(each.lora_A.out_features for each in matrices.values())
        for target, each in matrices.items():
            rank = each.lora_A.out_features
            spread[target] = functional.pad(each.lora_B.weight, (before, width - before - rank))
            before += rank
        taken, found = dict.fromkeys(spread, 0), []
        for name, count in self.rows:
            if name is None:
                found.append(next(iter(spread.values())).new_zeros(count, width))
            else:
                found.append(spread[name][taken[name] : taken[name] + count])
                taken[name] += count
        return torch.cat(found)


def attach(network: Network, lora: LoRA, *, family: str, seed: int, where: str) -> None:
    """Freeze the network and give its layers adapters, in place. Raises StageError for a target that no layer of the
    model, which is of this family (`model_type`), has."""
    whole, base = parameters(network.shape, Part()), network.table
    names = sorted({_end(piece.name) for each in whole.values() if not each.expert for piece in each.pieces})
    network.requires_grad_(False)
    network.shape = replace(network.shape, lora=replace(lora, targets=lora.layers(family, names, where)))
    network.table = table = parameters(network.shape, network.part)
    group = network.groups.process.tp if network.part.tensors > 1 else None
    kind = {"device": network.groups.device, "dtype": network.config.params_dtype}
    for name, parameter in base.items():
        path = name.removesuffix(".weight")
        targets: dict[str, TargetAdapter] = {}
        for end in dict.fromkeys(_end(piece.name) for piece in parameter.pieces):
            if (a := table.get(f"{path}.adapter.targets.{end}.{A}")) is not None:
                b = table[f"{path}.adapter.targets.{end}.{B}"]
                targets[end] = TargetAdapter((a.shape[1], lora.rank, b.shape[0]), kind)
                _start(targets[end], a, b, seed)
        if targets:
            layer: Any = network.get_submodule(path)
            pieces = sorted(parameter.pieces, key=lambda piece: piece.at)
            ends = [(_end(piece.name), piece.rows[1] - piece.rows[0]) for piece in pieces]
            rows = [(end if end in targets else None, count) for end, count in ends]
            layer.adapter = LayerAdapter(
                targets,
                rows,
                lora.scaling,
                divides_inputs=parameter.divided == 1,
                group=None if parameter.divided is None else group,
            )
            layer.register_forward_hook(_add)


@contextmanager
def without(network: Network) -> Iterator[None]:
    """Inside this context, the network computes as it was before training."""
    adapters = [module for module in network.modules() if isinstance(module, LayerAdapter)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def _add(layer: Any, given: tuple[torch.Tensor, ...], made: Any) -> Any:
    """Add what the adapters do, after a layer has computed: its outputs, or these and a bias that was not added."""
    if not layer.adapter.is_on:
        return made
    x_SNI = given[0]
    if (norm := getattr(layer, "layer_norm_weight", None)) is not None:  # of Transformer Engine, inside the layer
        x_SNI = functional.rms_norm(x_SNI, norm.shape, norm, layer.eps)
    if isinstance(made, torch.Tensor):
        return layer.adapter(x_SNI, made)
    return layer.adapter(x_SNI, made[0]), made[1]


@torch.no_grad()
def _start(target: TargetAdapter, a: Parameter, b: Parameter, seed: int) -> None:
    """Set the first values of this rank's part, and what Megatron-core has to know of it."""
    (piece,) = a.pieces
    target.lora_A.weight.copy_(first_a(piece.name, piece.shape, seed)[piece.box])
    target.lora_B.weight.zero_()
    for weight, parameter in ((target.lora_A.weight, a), (target.lora_B.weight, b)):
        if parameter.divided is None:
            weight.sequence_parallel = True  # type: ignore[attr-defined]
        else:
            set_tensor_model_parallel_attributes(weight, True, parameter.divided, 1)


def _end(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
