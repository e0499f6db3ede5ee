"""The plain way, which every other one is compared with: whole tensors are put together, and cut again, one by one.

No plan, no table and no kernel; every byte goes through the CPU. It is slow, and meant to be obviously right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ops.refit.layout import Layout, Place, Tensor
from ops.refit.share import Share, bytes_of, layout_of

CPU = torch.device("cpu")


class Golden:
    """A receiver: one of those that `layout` is the layout of, with its buffers, flat bytes on any device."""

    def __init__(self, layout: Layout, receiver: int, buffers: Mapping[str, torch.Tensor]) -> None:
        self._own, self._buffers = _by_tensor(layout.ranks[receiver]), buffers

    def run(self, shares: Sequence[Share]) -> int:
        """Bring this receiver's bytes, from shares that have bytes; how many there are. Done when it returns."""
        source, moved_bytes = layout_of(shares), 0
        given = [(bytes_of(share, CPU), _by_tensor(places)) for share, places in zip(shares, source.ranks)]
        for name, tensor in source.tensors.items():
            whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for memory, places in given:
                for place in places.get(name, ()):
                    whole[_index(place)] = _view(memory, place, tensor)
            for place in self._own.get(name, ()):
                part = whole[_index(place)]
                _view(self._buffers[place.buffer], place, tensor).copy_(part)
                moved_bytes += part.numel() * tensor.item_bytes
        return moved_bytes


def _by_tensor(places: Sequence[Place]) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for place in places:
        found.setdefault(place.tensor, []).append(place)
    return found


def _index(place: Place) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in place.box)


def _view(memory: torch.Tensor, place: Place, tensor: Tensor) -> torch.Tensor:
    """What lies in a place, in its shape."""
    typed = memory.view(getattr(torch, tensor.dtype))
    sizes = [stop - start for start, stop in place.box]
    strides = [stride // tensor.item_bytes for stride in place.strides]
    return typed.as_strided(sizes, strides, typed.storage_offset() + place.offset // tensor.item_bytes)
