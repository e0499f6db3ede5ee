"""Quantizes a trainer rank's part of a model for a refit, with the scales of the whole model's blocks.

    quantizer = Quantizer(tensors, places, parameters, ledger, reduce)
    held = quantizer.filled(parameters)     # for each version; `quantizer.tensors` and `quantizer.places` describe it
    quantizer.record                        # the error of each layer

A rank may hold any slices of a matrix: the largest elements of blocks that slices cut are combined over all ranks. So
the bytes do not depend on how training divides the model. Knows tensors and places, not engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias

import torch

from ops import quantize
from ops.refit.layout import Place, Tensor, whole
from ops.refit.ledger import Ledger
from stages.backends.model.blocks import SUFFIX, begun, cuts, grid, is_quantized, quantized_tensors, touched

Reduce: TypeAlias = Callable[[torch.Tensor, Literal["max", "sum"]], None]  # over all ranks of the trainer, in place
SCALES = "scales"  # the buffer with the scales of all tensors
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class _Slice:
    """A quantized place: its 8-bit floats, the largest elements and scales of its blocks within those of the model, its
    first row and column, and the index of its layer."""

    place: Place
    item_bytes: int
    out: torch.Tensor
    largest: torch.Tensor
    scale: torch.Tensor
    at: tuple[int, int]
    layer: int

    def of(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the elements, in the dtype of training."""
        return _view(parameters[self.place.buffer].detach(), self.place, self.item_bytes)


class Quantizer:
    """The quantized part of one rank. `reduce` combines a tensor over all ranks, which call `filled` together."""

    def __init__(
        self, tensors: Mapping[str, Tensor], places: Sequence[Place], parameters: Mapping[str, torch.Tensor],
        ledger: Ledger, reduce: Reduce,
    ) -> None:  # fmt: skip
        self.tensors, self._reduce = quantized_tensors(tensors), reduce
        self.places = [place for place in places if not is_quantized(place.tensor)]
        self.record: dict[str, float] = {}
        device = next(iter(parameters.values())).device
        starts, size = {}, 0
        for name in sorted(filter(is_quantized, tensors)):
            starts[name] = size
            size += prod(grid(tensors[name].shape))
        self._largest, self._scales = (ledger.empty(4 * size).view(torch.float32) for _ in range(2))
        layers = sorted({_layer(name) for name in starts}, key=lambda layer: (len(layer), layer))
        self._layers = layers
        self._held: dict[str, torch.Tensor] = {SCALES: self._scales}
        self._slices: list[_Slice] = []
        for place in places:
            if is_quantized(place.tensor):
                self._add(place, tensors[place.tensor], starts[place.tensor], parameters, ledger)
        cut = any(cuts(each.place.box, tensors[each.place.tensor].shape) for each in self._slices)
        cutting = torch.tensor([float(cut)], device=device)
        reduce(cutting, "max")
        self._together = bool(cutting.item())  # some rank holds part of a block

    def filled(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Quantize the current values. Returns the buffers of `places`, which the next call overwrites."""
        self._largest.zero_()
        for each in self._slices:
            torch.maximum(each.largest, quantize.largest(each.of(parameters), each.at), out=each.largest)
        if self._together:
            self._reduce(self._largest, "max")
        self._scales.copy_(quantize.scales(self._largest))
        sums = torch.zeros(len(self._layers), 2, dtype=torch.float64, device=self._scales.device)
        for each in self._slices:
            sums[each.layer] += quantize.quantize(each.of(parameters), each.scale, each.out, each.at)
        self._reduce(sums, "sum")
        self._note(sums)
        return self.buffers(parameters)

    def buffers(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the buffers as they are."""
        return {**parameters, **self._held}

    def _add(
        self, place: Place, tensor: Tensor, start: int, parameters: Mapping[str, torch.Tensor], ledger: Ledger
    ) -> None:
        buffer, scales = f"{place.buffer} as {quantize.DTYPE}", grid(tensor.shape)
        if buffer not in self._held:
            parameter = parameters[place.buffer]
            self._held[buffer] = ledger.empty(parameter.numel()).zero_().view(quantize.DTYPE).view(parameter.shape)
        here = tuple(stride // tensor.item_bytes for stride in place.strides)
        own = replace(place, buffer=buffer, offset=place.offset // tensor.item_bytes, strides=here)
        self.places.append(own)
        strides = tuple(4 * prod(scales[i + 1 :]) for i in range(len(scales)))
        every = Place(place.tensor + SUFFIX, whole(scales), SCALES, 4 * start, strides)
        if all(first < last for first, last in begun(place.box)):
            self.places.append(_within(every, begun(place.box)))
        at = _within(every, touched(place.box))
        self._slices.append(
            _Slice(
                place,
                tensor.item_bytes,
                _view(self._held[buffer], own, 1),
                _view(self._largest, at, 4),
                _view(self._scales, at, 4),
                (place.box[-2][0], place.box[-1][0]),
                self._layers.index(_layer(place.tensor)),
            )
        )

    def _note(self, sums: torch.Tensor) -> None:
        errors = {name: quantize.relative_error(row) for name, row in zip(self._layers, sums.cpu())}
        self.record = {
            "quant_error": sum(errors.values()) / len(errors),
            "quant_error_worst": max(errors.values()),
            **{f"quant_error_{name}": error for name, error in errors.items()},
        }


def alone(tensor: torch.Tensor, how: Literal["max", "sum"]) -> None:
    """Reduce over one rank."""


def _within(place: Place, box: tuple[tuple[int, int], ...]) -> Place:
    """Return the place of a box inside that of a whole tensor."""
    offset = place.offset + sum(start * stride for (start, _), stride in zip(box, place.strides))
    return replace(place, box=box, offset=offset)


def _view(memory: torch.Tensor, place: Place, item_bytes: int) -> torch.Tensor:
    sizes = [stop - start for start, stop in place.box]
    strides = [stride // item_bytes for stride in place.strides]
    return memory.as_strided(sizes, strides, memory.storage_offset() + place.offset // item_bytes)


def _layer(name: str) -> str:
    """Return the layer of a tensor as it is named in metrics."""
    found = _LAYER.search(name)
    return f"layer_{found[1]}" if found else name.removesuffix(".weight")
