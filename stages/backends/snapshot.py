"""Weights in one piece of GPU memory, which other processes of the machine read in place by a handle.

The owner fills it again for every version, at the same place; whoever opened it keeps it open. Knows CUDA's memory
handles as torch passes them on; it does not know whose weights these are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import torch

ALIGNED = 256  # bytes; every tensor begins at a multiple


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and its first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in the memory, as a view."""
        raw = memory[self.start : self.start + self.size_bytes]
        return raw.view(getattr(torch, self.dtype)).view(self.shape)


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """What another process opens a snapshot with. Plain values: it can travel anywhere, and means something on the
    machine of the snapshot only, as long as its owner lives."""

    entries: tuple[Entry, ...]
    memory: tuple[Any, ...]  # as torch passes memory on, without the device


class Snapshot(Mapping[str, torch.Tensor]):
    """Tensors by name, copied into one piece of memory on the device of the first."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._held: dict[str, torch.Tensor] = {}
        self._entries: tuple[Entry, ...] = ()
        self._handle: Handle | None = None

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
        """Copy the tensors; names, dtypes and shapes are those of the first time. Done when it returns."""
        if not self._held:
            tensors = self._allocate(dict(tensors))
        for name, tensor in tensors:
            self._held[name].copy_(tensor)
        if self._memory.is_cuda:
            torch.cuda.synchronize(self._memory.device)
        return self

    def handle(self) -> Handle:
        """What other processes open it with."""
        if self._handle is None:
            _, *memory = self._memory.untyped_storage()._share_cuda_()
            self._handle = Handle(self._entries, tuple(memory))
        return self._handle

    def __reduce__(self) -> Any:
        """To another process goes the handle."""
        return _same, (self.handle(),)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _allocate(self, tensors: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        entries, start = [], 0
        for name, tensor in tensors.items():
            entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
            start += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        self._entries = tuple(entries)
        self._memory = torch.empty(start, dtype=torch.uint8, device=next(iter(tensors.values())).device)
        self._held = {entry.name: entry.of(self._memory) for entry in entries}
        return tensors.items()


def _same(handle: Handle) -> Handle:
    return handle


def opened(handle: Handle, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of another process's snapshot, in place. `device` is one of this process that reads them."""
    memory = _opened(handle.memory, device)
    return {entry.name: entry.of(memory) for entry in handle.entries}


@lru_cache(maxsize=2)
def _opened(memory: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """The memory, mapped for `device`: torch itself would map it for the one that has its owner's number."""
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *memory)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
