"""Where a refit writes a rank's parameters inside vLLM: in place, or into staging memory that vLLM then processes.

Most parameters are where the table of places says, and are written there. On the CPU vLLM computes with packed
matrices: a version is received into separate memory and repacked. Tensors without a rule are received whole and go
through vLLM's own loader. Knows modules and memory, not who sends.

8-bit floats and their scales are written in place too: on Hopper vLLM computes with them as they are loaded, and what
it does after loading changes nothing, since the scales are powers of two (ops/quantize.py). On GPUs where it packs the
scales, `differing` finds other parameters, and these modules go through the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ops.refit.layout import Place, Tensor, dense, whole
from ops.refit.ledger import Ledger
from stages.backends.model import blocks
from stages.backends.model.precision import kept_dtype
from stages.backends.model.shards import Shards
from stages.backends.vllm.families import loadable
from stages.backends.vllm.table import ParameterTable


class Storage:
    """Storage of one rank. `by_loader` are parameters, by vLLM's names, for which the table is wrong; vLLM loads their
    whole modules. Without a table, everything `offered` goes through the loader. `ledger` counts the memory that is not
    vLLM's own."""

    def __init__(
        self, network: nn.Module, table: ParameterTable | None, *, by_loader: Collection[str],
        offered: Mapping[str, Tensor], device: torch.device, ledger: Ledger,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._network, self._device = network, device
        self._table, self._by_loader = table, {_module(name) for name in by_loader}
        self.tensors = dict(offered) | ({} if table is None else table.tensors)
        ruled = {place.tensor for place in self._ruled(0)}
        self.loaded = [name for name in self.tensors if name not in ruled]
        self.held = self._parameters(table) if table is not None else {}
        for name in self.loaded:
            self.held[_whole(name)] = self._empty(self.tensors[name].shape, getattr(torch, self.tensors[name].dtype))

    def places(self, rank: int) -> list[Place]:
        """A rank's places, as buffers of `held`."""
        tensors = {name: self.tensors[name] for name in self.loaded}
        beside = [dense(name, whole(each.shape), each.item_bytes, _whole(name)) for name, each in tensors.items()]
        return self._ruled(rank) + beside

    def parts(self, rank: int) -> Callable[[str], torch.Tensor | None]:
        """What reads a rank's part of a received tensor, by the model's name: a view of the memory that it was received
        in, or None if the model has no such tensor. Not for tensors that have several places."""
        places = {place.tensor: place for place in self.places(rank)}

        def read(name: str) -> torch.Tensor | None:
            if (place := places.get(name)) is None:
                return None
            return _view(place, self.tensors[name].item_bytes, self.held[place.buffer])

        return read

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the tensors that go through vLLM's loader."""
        return sum(self.held[_whole(name)].nbytes for name in self.loaded)

    @torch.no_grad()
    def finish(self, load: Callable[[Iterator[tuple[str, torch.Tensor]]], None]) -> None:
        """Have vLLM process the received weights; call it when all have arrived. `load` is vLLM's own loader."""
        on_cpu = self._device.type == "cpu"
        if on_cpu:
            self._drop_expert_kernels()
        if self.loaded:
            load(self._singles())
        if on_cpu and self._table is not None:
            self._pack()

    def _ruled(self, rank: int) -> list[Place]:
        if self._table is None:
            return []
        return [place for place in self._table.places(rank) if _module(place.buffer) not in self._by_loader]

    def _parameters(self, table: ParameterTable) -> dict[str, torch.Tensor]:
        """Parameters by vLLM's names: vLLM's own memory; on the CPU separate memory, but for those that vLLM does not
        pack and uses by reference."""
        shapes = {name: shape for name, shape in table.shapes.items() if _module(name) not in self._by_loader}
        live = _parameters(self._network)
        apart = set(shapes) if self._device.type == "cpu" else set()
        return {
            name: self._empty(shape, table.dtypes[name]).zero_()
            if name in apart and not kept_dtype(name)
            else live[name].data
            for name, shape in shapes.items()
        }

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._ledger.empty(prod(shape) * dtype.itemsize).view(dtype).view(*shape)

    def _drop_expert_kernels(self) -> None:
        """On the CPU, vLLM pads and packs experts only when it creates their kernel: have it create one again."""
        for module in self._network.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _pack(self) -> None:
        """Give each module the received parameters and have vLLM pack them."""
        known = {id(parameter): name for name, parameter in _parameters(self._network).items()}
        apart = {name: tensor for name, tensor in self.held.items() if not kept_dtype(name)}
        fresh = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in apart.items()}
        for prefix, module in self._network.named_modules():
            for own, parameter in list(module._parameters.items()):
                name = _plain(f"{prefix}.{own}")
                name = name if name in fresh else known.get(id(parameter), "")  # tied
                if name in fresh:
                    module._parameters[own] = fresh[name]
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(module)

    def _singles(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.loaded:
            yield from loadable(name, self.held[_whole(name)])


def differing(network: nn.Module, table: ParameterTable, rank: int, *, device: torch.device, folder: Path) -> list[str]:
    """Parameters, by vLLM's names, for which the table is wrong: they are missing, have another shape, or differ from
    the folder in the first, middle or last row of a place.

    Call it before the first refit, while the parameters are what vLLM's own loader read from the folder. For packed
    parameters, on the CPU, only names can be compared.
    """
    live, shards = _parameters(network), Shards(folder)
    if device.type == "cpu":
        return sorted(table.shapes.keys() - live.keys())
    found = {
        name
        for name, shape in table.shapes.items()
        if name not in live
        or not live[name].is_contiguous()
        or (tuple(live[name].shape), live[name].dtype) != (shape, table.dtypes[name])
    }
    for place in table.places(rank):
        if place.buffer not in found and not _same(place, table.tensors[place.tensor], live[place.buffer].data, shards):
            found.add(place.buffer)
    return sorted(found)


def wrong_layers(network: nn.Module) -> str:
    """Why the layers that are 8-bit floats are not those that should be (`blocks.refused`); empty if they are."""
    kinds = {name: parameter.dtype for name, parameter in _parameters(network).items()}
    eight = [name for name, dtype in kinds.items() if dtype == torch.float8_e4m3fn]
    return blocks.refused(eight, kinds.keys() - set(eight))


def _same(place: Place, tensor: Tensor, parameter: torch.Tensor, shards: Shards) -> bool:
    here = _view(place, tensor.item_bytes, parameter)
    sizes = list(here.shape)
    rows: list[tuple[int, ...]] = [(i,) for i in _ends(sizes[0])]
    if "experts.*." in place.tensor:
        rows = [(e, i) for e in _ends(sizes[0]) for i in _ends(sizes[1])]
    for row in rows:
        box = [slice(start + i, start + i + 1) for (start, _), i in zip(place.box, row)]
        box += [slice(*edges) for edges in place.box[len(row) :]]
        name, shape = place.tensor, tensor.shape
        if "experts.*." in name:
            name, shape, box = name.replace("*", str(box[0].start)), shape[1:], box[1:]
        there = shards.box(name, shape, tuple(box)).flatten().to(parameter.dtype)
        if not torch.equal(here[row].flatten().cpu().view(torch.uint8), there.view(torch.uint8)):
            return False
    return True


def _view(place: Place, item_bytes: int, buffer: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies in a buffer."""
    sizes = [stop - start for start, stop in place.box]
    strides = [stride // item_bytes for stride in place.strides]
    return torch.as_strided(buffer.view(-1), sizes, strides, place.offset // item_bytes)


def _parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    return {_plain(name): parameter for name, parameter in network.named_parameters()}


def _module(name: str) -> str:
    """The name of a parameter's module."""
    return name.rpartition(".")[0]


def _plain(name: str) -> str:
    """A parameter's name in vLLM 0.26; later versions nest the experts one module deeper."""
    return name.replace(".experts.routed_experts.", ".experts.")


def _ends(size: int) -> list[int]:
    return sorted({0, size // 2, size - 1})


def _whole(name: str) -> str:
    return f"whole {name}"
