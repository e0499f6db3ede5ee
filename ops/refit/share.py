"""What a trainer's rank offers of its weights: its part of a version, where it lies, and the checksums of it.

    shares = Shares(tensors, places, parameters)           # on each rank, once
    share = shares.publish(parameters)                     # for each version; those of all ranks are a model

The part is copied into memory that readers open, so that training goes on while they read. A worker that begins to
serve later still finds this version, until the next one is published.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch

from ops.refit.layout import Layout, Place, Tensor
from ops.refit.memory import Handle, Mark, SharedMemory, opened
from ops.refit.move import flat
from ops.refit.sums import Summed, Sums, digest

ALIGNED = 256  # bytes; every parameter begins at a multiple


@dataclass(frozen=True, eq=False)
class Share:
    """A rank's part of a version. `memory` is what the transport's sender offers: memory that processes of its machine
    open, the bytes themselves, or anything else; or the mark of memory that the rank itself sends from."""

    layout: bytes  # tensors of the model, and places of this rank in the memory
    summed: Summed
    memory: Any

    @property
    def model_bytes(self) -> int:
        """Of the whole model."""
        tensors, _ = _decoded(self.layout)
        return sum(tensor.item_bytes * prod(tensor.shape) for tensor in tensors.values())


def open_to(memory: SharedMemory) -> SharedMemory:
    """Offers the memory itself."""
    return memory


class Shares:
    """Copies a rank's parameters and says where they are. Dtypes are those of the model's tensors, whatever the
    parameters have.

    On the CPU two versions are kept, so that a reader that comes late finds the one before while the next is written;
    on a GPU, where memory is dear, one.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], places: Sequence[Place], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        on_cpu = next(iter(parameters.values())).device.type == "cpu"
        self._all = [_Version(tensors, places, parameters) for _ in range(2 if on_cpu else 1)]
        self._versions = cycle(self._all)

    def publish(self, parameters: Mapping[str, torch.Tensor], offer: Callable[[SharedMemory], Any] = open_to) -> Share:
        """The share of what the contiguous parameters are now; `offer` says what stands for the memory that has it."""
        version = next(self._versions)
        return Share(version.layout, version.filled(parameters), offer(version.memory))

    def memory(self, mark: Mark) -> torch.Tensor:
        """The flat bytes that a share's mark stands for. Raises ValueError for a mark of another process."""
        for each in self._all:
            if each.memory.mark == mark:
                return each.memory.bytes
        raise ValueError(f"this rank has no memory with the mark {mark.mark!r}; another process offered it")


class _Version:
    """Memory for one version."""

    def __init__(
        self, tensors: Mapping[str, Tensor], places: Sequence[Place], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        dtypes = {place.buffer: getattr(torch, tensors[place.tensor].dtype) for place in places}
        starts, size = {}, 0
        for name, dtype in dtypes.items():
            starts[name] = size
            size += -(-parameters[name].numel() * dtype.itemsize // ALIGNED) * ALIGNED
        self.memory = SharedMemory(size, next(iter(parameters.values())).device)
        self._own: dict[str, torch.Tensor] = {}  # flat bytes of the copies, by the parameters' names
        self._cast: dict[str, torch.Tensor] = {}  # copies of parameters that have another dtype
        for name, start in starts.items():
            parameter, dtype = parameters[name], dtypes[name]
            self._own[name] = self.memory.bytes[start : start + parameter.numel() * dtype.itemsize]
            if parameter.dtype != dtype:
                self._cast[name] = self._own[name].view(dtype).view(parameter.shape)
        self._tensors, self._places = tensors, places
        self._sums: Sums | None = None
        self._addresses: list[int] = []
        placed = [replace(place, buffer="", offset=starts[place.buffer] + place.offset) for place in places]
        self.layout = zlib.compress(msgspec.msgpack.encode((tensors, placed)))  # it goes along with every version

    @torch.no_grad()
    def filled(self, parameters: Mapping[str, torch.Tensor]) -> Summed:
        """The checksums, when all of it is there."""
        same = [name for name in self._own if name not in self._cast]
        addresses = [parameters[name].data_ptr() for name in same]
        if self._sums is None or addresses != self._addresses:
            sources = self._own | {name: flat(parameters[name]) for name in same}
            self._sums = Sums(self._tensors, self._places, self._own.__getitem__, sources.__getitem__)
            self._addresses = addresses
        if self._cast:
            torch._foreach_copy_(list(self._cast.values()), [parameters[name].detach() for name in self._cast])
        return self._sums.now()  # and copies the others


def bytes_of(share: Share, device: torch.device) -> torch.Tensor:
    """The flat bytes of a share whose memory can be read here, by this device: in place, or on the CPU."""
    if isinstance(share.memory, np.ndarray):
        return torch.from_numpy(share.memory)
    assert isinstance(share.memory, Handle | SharedMemory), "it is not memory, and not bytes"
    return opened(share.memory, device)


def layout_of(shares: Sequence[Share]) -> Layout:
    """Where all ranks hold the model."""
    return _layout(tuple(share.layout for share in shares))


def digest_of(shares: Sequence[Share]) -> str:
    """The hash of the version, which does not depend on how it was divided.

    Raises ValueError, naming the tensor, where ranks disagree or do not have all of it.
    """
    return digest(layout_of(shares).tensors, [share.summed for share in shares])


@lru_cache(maxsize=2)
def _layout(layouts: tuple[bytes, ...]) -> Layout:
    decoded = [_decoded(each) for each in layouts]
    return Layout(decoded[0][0], [places for _, places in decoded])


@lru_cache(maxsize=1024)
def _decoded(layout: bytes) -> tuple[dict[str, Tensor], list[Place]]:
    return msgspec.msgpack.decode(zlib.decompress(layout), type=tuple[dict[str, Tensor], list[Place]])
