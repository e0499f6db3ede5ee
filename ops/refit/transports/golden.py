"""The reference for all other transports: assembles whole tensors and slices them, one at a time.

No plan, no table, no kernel; every byte goes through the CPU. Slow, and meant to be obviously correct.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ops.refit.layout import Place, Tensor
from ops.refit.share import Share, bytes_of
from ops.refit.transports.base import Receiver
from ops.refit.transports.meeting import Meeting, Record

CPU = torch.device("cpu")


class GoldenReceiver(Receiver):
    """Receives shares that are bytes, or memory readable on the CPU."""

    def receive(self, meeting: Meeting, shares: Sequence[Share], version: int) -> Record:
        """Write this receiver's bytes; complete on return."""
        moved_bytes, own = 0, _by_tensor(meeting.destination.ranks[meeting.number])
        given = [(bytes_of(share, CPU), _by_tensor(places)) for share, places in zip(shares, meeting.source.ranks)]
        for name, tensor in meeting.source.tensors.items():
            whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            meeting.ledger.briefly(whole.nbytes)
            for memory, places in given:
                for place in places.get(name, ()):
                    whole[_index(place)] = _view(memory, place, tensor)
            for place in own.get(name, ()):
                part = whole[_index(place)]
                _view(meeting.buffers[place.buffer], place, tensor).copy_(part)
                moved_bytes += part.numel() * tensor.item_bytes
        return {"received_bytes": float(moved_bytes)}


def _by_tensor(places: Sequence[Place]) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for place in places:
        found.setdefault(place.tensor, []).append(place)
    return found


def _index(place: Place) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in place.box)


def _view(memory: torch.Tensor, place: Place, tensor: Tensor) -> torch.Tensor:
    """Return a view of a place's memory in the shape of its box."""
    typed = memory.view(getattr(torch, tensor.dtype))
    sizes = [stop - start for start, stop in place.box]
    strides = [stride // tensor.item_bytes for stride in place.strides]
    return typed.as_strided(sizes, strides, typed.storage_offset() + place.offset // tensor.item_bytes)
