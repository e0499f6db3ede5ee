"""The device of a worker and its memory: claimed once, given to another process and taken again. Knows no model."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable

import torch

from pipeline import StageError, WorkerGroup
from pipeline.errors import Problem

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP_BYTES = 1 << 30


def claim(group: WorkerGroup) -> torch.device:
    """What this worker computes on, its threads and memory set. Raises StageError where the group asks for GPUs and
    torch sees none."""
    if group.gpus > 0 and not torch.cuda.is_available():
        raise StageError(
            Problem(
                where=str(group.location),
                what=f"worker group {group.name!r} asks for {group.gpus} GPUs and torch sees none",
                why="a group with gpus above 0 computes on CUDA",
                fix="gpus=0 for the CPU, or a machine and a torch build with CUDA",
            )
        )
    if group.threads > 0:
        torch.set_num_threads(group.threads)
    keep_freed_memory()
    return torch.device("cuda", torch.cuda.current_device()) if group.gpus > 0 else torch.device("cpu")


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process: by default it returns large blocks to the kernel when they are freed,
    so the activations of a small model are mapped, and their pages faulted in, again at every step. False where the C
    library is another one."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))


def bytes_in_use(device: torch.device) -> int:
    """By all processes, after this one has returned what it does not need; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class Parking:
    """Tensors that wait on the host while their device is another process's. They stay the same objects, so whoever
    holds them can read and write them meanwhile. The memory on the host is kept for the next time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._places: dict[int, torch.Tensor] = {}  # by the tensor's identity
        self._parked: list[torch.Tensor] = []

    def park(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move the contents to the host. Nothing else may share their memory."""
        for tensor in tensors:
            place = self._places.get(id(tensor))
            if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                pinned = self.device.type == "cuda"
                place = self._places[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            place.copy_(tensor.detach(), non_blocking=True)
            self._parked.append(tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for tensor in self._parked:
            tensor.data = self._places[id(tensor)]

    def leave(self) -> None:
        """Move everything back."""
        for tensor in self._parked:
            tensor.data = tensor.data.to(self.device, non_blocking=True, copy=True)
        self._parked.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
