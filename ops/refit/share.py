"""A trainer rank's share of a version: its part of the weights, where it is in memory, and its checksums.

    shares = Shares(tensors, places, parameters)           # on each rank, once
    share = shares.publish(parameters)                     # for each version; the shares of all ranks form the model

The part is copied into memory that readers open, so training continues while they read. A worker that starts later
still finds this version until the next one is published.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import cycle
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch

from ops.refit.layout import Layout, Place, Tensor
from ops.refit.ledger import Ledger
from ops.refit.memory import Handle, Mark, SharedMemory, opened
from ops.refit.move import flat
from ops.refit.sums import Summed, Sums, digest

ALIGNED = 256  # bytes; every parameter begins at a multiple


@dataclass(frozen=True, eq=False)
class Share:
    """A rank's part of a version. `memory` is the offer of the transport's sender: memory that processes on the same
    machine open, the bytes themselves, anything else, or the mark of memory that the rank itself sends from. `record`
    are metrics of the rank."""

    layout: bytes  # tensors of the model, and this rank's places in the memory
    summed: Summed
    memory: Any
    record: Mapping[str, float] = field(default_factory=dict)

    @property
    def model_bytes(self) -> int:
        """Bytes of the whole model."""
        tensors, _ = _decoded(self.layout)
        return sum(tensor.item_bytes * prod(tensor.shape) for tensor in tensors.values())


def open_to(memory: SharedMemory) -> SharedMemory:
    """Offer the memory itself."""
    return memory


class Shares:
    """Copies a rank's parameters and describes where they are. The copies have the dtypes of the model's tensors,
    regardless of the parameters' own. `ledger` counts them.

    On the CPU the last two versions are kept, so a late reader finds the previous one while the next is written; on a
    GPU, where memory is scarce, only one.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], places: Sequence[Place], parameters: Mapping[str, torch.Tensor],
        ledger: Ledger | None = None,
    ) -> None:  # fmt: skip
        on_cpu = next(iter(parameters.values())).device.type == "cpu"
        self._all = [_VersionMemory(tensors, places, parameters, ledger) for _ in range(2 if on_cpu else 1)]
        self._versions = cycle(self._all)

    def publish(self, parameters: Mapping[str, torch.Tensor], offer: Callable[[SharedMemory], Any] = open_to) -> Share:
        """Publish the current values of contiguous parameters. `offer` returns what represents the memory in the
        share."""
        version = next(self._versions)
        return Share(version.layout, version.filled(parameters), offer(version.memory))

    def buffers(self, mark: Mark) -> dict[str, torch.Tensor]:
        """Return the flat bytes for a share's mark, by buffer. Raises ValueError for a mark of another process."""
        for each in self._all:
            if each.memory.mark == mark:
                return {"": each.memory.bytes}
        raise _unknown(mark)


class Lent:
    """Describes a rank's parameters in place, without a copy, and computes their checksums. They must not change until
    they are sent."""

    def __init__(self, tensors: Mapping[str, Tensor], places: Sequence[Place]) -> None:
        self._tensors, self._places, self._mark = tensors, places, Mark.new()
        self._buffers: dict[str, torch.Tensor] = {}
        self._sums: Sums | None = None
        self._layout = _encoded(tensors, places)

    def publish(self, parameters: Mapping[str, torch.Tensor]) -> Share:
        """Publish contiguous parameters. Raises ValueError if one has another dtype than the model's tensor."""
        if self._sums is None or any(
            memory.data_ptr() != parameters[name].data_ptr() for name, memory in self._buffers.items()
        ):
            self._note(parameters)
        assert self._sums is not None
        return Share(self._layout, self._sums.now(), self._mark)

    def buffers(self, mark: Mark) -> dict[str, torch.Tensor]:
        """Return the flat bytes of the parameters, by name. Raises ValueError for a mark of another process."""
        if mark != self._mark:
            raise _unknown(mark)
        return self._buffers

    def summed(self) -> Summed | None:
        """Return the checksums of the parameters as they are now; None before `publish`."""
        return None if self._sums is None else self._sums.now()

    def _note(self, parameters: Mapping[str, torch.Tensor]) -> None:
        for place in self._places:
            wanted, found = self._tensors[place.tensor].dtype, parameters[place.buffer].dtype
            if found != getattr(torch, wanted):
                raise ValueError(f"{place.buffer!r} is {found} in training and torch.{wanted} in the refit")
        self._buffers = {place.buffer: flat(parameters[place.buffer]) for place in self._places}
        self._sums = Sums(self._tensors, self._places, self._buffers.__getitem__)
        self._mark = Mark.new()


class _VersionMemory:
    """Memory for one version."""

    def __init__(
        self, tensors: Mapping[str, Tensor], places: Sequence[Place], parameters: Mapping[str, torch.Tensor],
        ledger: Ledger | None,
    ) -> None:  # fmt: skip
        dtypes = {place.buffer: getattr(torch, tensors[place.tensor].dtype) for place in places}
        starts, size = {}, 0
        for name, dtype in dtypes.items():
            starts[name] = size
            size += -(-parameters[name].numel() * dtype.itemsize // ALIGNED) * ALIGNED
        self.memory = SharedMemory(size, next(iter(parameters.values())).device, ledger)
        self._own: dict[str, torch.Tensor] = {}  # flat bytes of the copies, by the parameters' names
        self._cast: dict[str, torch.Tensor] = {}  # copies of parameters with another dtype
        for name, start in starts.items():
            parameter, dtype = parameters[name], dtypes[name]
            self._own[name] = self.memory.bytes[start : start + parameter.numel() * dtype.itemsize]
            if parameter.dtype != dtype:
                self._cast[name] = self._own[name].view(dtype).view(parameter.shape)
        self._tensors, self._places = tensors, places
        self._sums: Sums | None = None
        self._addresses: list[int] = []
        placed = [replace(place, buffer="", offset=starts[place.buffer] + place.offset) for place in places]
        self.layout = _encoded(tensors, placed)

    @torch.no_grad()
    def filled(self, parameters: Mapping[str, torch.Tensor]) -> Summed:
        """Copy the parameters and return the checksums."""
        same = [name for name in self._own if name not in self._cast]
        addresses = [parameters[name].data_ptr() for name in same]
        if self._sums is None or addresses != self._addresses:
            sources = self._own | {name: flat(parameters[name]) for name in same}
            self._sums = Sums(self._tensors, self._places, self._own.__getitem__, sources.__getitem__)
            self._addresses = addresses
        if self._cast:
            torch._foreach_copy_(list(self._cast.values()), [parameters[name].detach() for name in self._cast])
        return self._sums.now()  # also copies the other parameters


def _encoded(tensors: Mapping[str, Tensor], places: Sequence[Place]) -> bytes:
    """Encode a share's layout, which is sent with every version."""
    return zlib.compress(msgspec.msgpack.encode((tensors, places)))


def _unknown(mark: Mark) -> ValueError:
    return ValueError(f"this rank has no memory with the mark {mark.mark!r}; another process offered it")


def bytes_of(share: Share, device: torch.device) -> torch.Tensor:
    """Return the flat bytes of a share whose memory this device can read: in place, or on the CPU."""
    if isinstance(share.memory, np.ndarray):
        return torch.from_numpy(share.memory)
    assert isinstance(share.memory, Handle | SharedMemory), "neither memory nor bytes"
    return opened(share.memory, device)


def layout_of(shares: Sequence[Share]) -> Layout:
    """Return the layout of the model over all ranks."""
    return _layout(tuple(share.layout for share in shares))


def digest_of(shares: Sequence[Share]) -> str:
    """Return the hash of the version, independent of its layout.

    Raises ValueError, naming the tensor, if ranks disagree or part of it is missing.
    """
    return digest(layout_of(shares).tensors, [share.summed for share in shares])


@lru_cache(maxsize=2)
def _layout(layouts: tuple[bytes, ...]) -> Layout:
    decoded = [_decoded(each) for each in layouts]
    return Layout(decoded[0][0], [places for _, places in decoded])


@lru_cache(maxsize=1024)
def _decoded(layout: bytes) -> tuple[dict[str, Tensor], list[Place]]:
    return msgspec.msgpack.decode(zlib.decompress(layout), type=tuple[dict[str, Tensor], list[Place]])
