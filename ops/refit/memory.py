"""Shared memory that other processes on this machine open by a handle. Knows bytes, not what they mean.

On a GPU, the handle is torch's CUDA memory handle. On the CPU, the memory is an unnamed in-memory file that disappears
with its owner but stays valid for readers that have opened it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from functools import cached_property
from typing import Any

import msgspec
import torch

from ops.refit.ledger import Ledger


class Handle(msgspec.Struct, frozen=True, array_like=True, tag="handle"):
    """The key with which another process opens memory. Plain values that can be sent anywhere, but are valid only on
    the memory's machine while its owner lives. `device` is "cuda" or "cpu". Handles are equal if and only if they refer
    to the same memory."""

    device: str
    size: int
    mark: str
    values: tuple[Any, ...]  # torch's values without the device, or the path of the file


class Mark(msgspec.Struct, frozen=True, array_like=True, tag="mark"):
    """Stands for memory that only its owner reads, to send from it. Different memory has different marks."""

    mark: str

    @staticmethod
    def new() -> Mark:
        """Return a mark that no other memory has."""
        return Mark(os.urandom(8).hex())


class SharedMemory:
    """Memory at a fixed address; `bytes` is a flat uint8 tensor. Pickling sends the handle. A ledger counts it."""

    def __init__(self, size: int, device: torch.device, ledger: Ledger | None = None) -> None:
        self.mark = Mark.new()
        if device.type == "cuda":
            self._file = -1
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            self._file = os.memfd_create("sluice", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
            if ledger is not None:
                ledger.follow(self, size)
            self.bytes = _mapped(self._file, size)

    @cached_property
    def handle(self) -> Handle:
        """The handle for other processes. Cached, so that they recognize it: each call of torch would create another
        reader count and another record of the memory."""
        if self._file >= 0:
            return Handle("cpu", len(self.bytes), self.mark.mark, (f"/proc/{os.getpid()}/fd/{self._file}",))
        _, *values = self.bytes.untyped_storage()._share_cuda_()
        return Handle("cuda", len(self.bytes), self.mark.mark, tuple(values))

    def __reduce__(self) -> Any:
        return _same, (self.handle,)


def opened(memory: Handle | SharedMemory, device: torch.device) -> torch.Tensor:
    """Open memory in place, as flat, read-only bytes for the reading `device`.

    Raises OSError if the owner of CPU memory has ended.
    """
    if isinstance(memory, SharedMemory):
        return memory.bytes
    if memory.device == "cpu":
        file = os.open(memory.values[0], os.O_RDWR | os.O_CLOEXEC)
        try:
            return _mapped(file, memory.size)
        finally:
            os.close(file)
    torch.cuda.init()  # torch itself would map it to the device with the owner's index
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *memory.values)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[: memory.size]


def _mapped(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _same(handle: Handle) -> Handle:
    return handle
