"""Memory that other processes of this machine open in place by a handle. Knows bytes, not what they mean.

On a GPU it is CUDA's memory handle as torch passes it on; on the CPU a file in memory without a name, which is gone
when its owner is, and which readers that have opened it keep.
"""

from __future__ import annotations

import mmap
import os
import weakref
from functools import cached_property
from typing import Any

import msgspec
import torch


class Handle(msgspec.Struct, frozen=True, array_like=True, tag="handle"):
    """What another process opens memory with. Plain values: it can travel anywhere, and means something on the machine
    of the memory only, as long as its owner lives. `device` is "cuda" or "cpu". Two of different memory differ, those
    of the same are equal."""

    device: str
    size: int
    mark: str
    values: tuple[Any, ...]  # as torch passes memory on, without the device; or the path of the file


class Mark(msgspec.Struct, frozen=True, array_like=True, tag="mark"):
    """Stands for memory that only its owner reads, who sends from it. Two of different memory differ."""

    mark: str


class SharedMemory:
    """Bytes that stay in their place; `bytes` is a flat uint8 tensor. To another process it goes as its handle."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.mark = Mark(os.urandom(8).hex())
        if device.type == "cuda":
            self._file = -1
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            self._file = os.memfd_create("sluice", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
            self.bytes = _mapped(self._file, size)

    @cached_property
    def handle(self) -> Handle:
        """What other processes open it with: always the same, so that they know it again. torch counts readers under
        another number, and keeps another record of them, each time it is asked."""
        if self._file >= 0:
            return Handle("cpu", len(self.bytes), self.mark.mark, (f"/proc/{os.getpid()}/fd/{self._file}",))
        _, *values = self.bytes.untyped_storage()._share_cuda_()
        return Handle("cuda", len(self.bytes), self.mark.mark, tuple(values))

    def __reduce__(self) -> Any:
        return _same, (self.handle,)


def opened(memory: Handle | SharedMemory, device: torch.device) -> torch.Tensor:
    """The bytes, flat, in place, to be read only. `device` is the one that reads them.

    Raises OSError where the owner of memory of the CPU is gone.
    """
    if isinstance(memory, SharedMemory):
        return memory.bytes
    if memory.device == "cpu":
        file = os.open(memory.values[0], os.O_RDWR | os.O_CLOEXEC)
        try:
            return _mapped(file, memory.size)
        finally:
            os.close(file)
    torch.cuda.init()  # torch itself would map it for the device that has its owner's number
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *memory.values)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[: memory.size]


def _mapped(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _same(handle: Handle) -> Handle:
    return handle
