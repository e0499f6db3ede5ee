"""The device of a worker and its memory: claimed once, given to another process and taken again. Knows no model."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from contextlib import nullcontext

import torch

from ops.lots import lots
from pipeline import StageError, WorkerGroup
from pipeline.errors import Problem

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP_BYTES = 1 << 30
_BLOCK_BYTES, _ALIGNMENT = 1 << 30, 512  # of pinned memory


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
    """By all processes; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def bytes_free(device: torch.device) -> int:
    """Of a GPU, after this process has returned what it does not need."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


class Parking:
    """Tensors that wait on the host while their device is another process's. They stay the same objects, so whoever
    holds them can read and write them meanwhile. The memory on the host is kept for the next time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._places: dict[int, torch.Tensor] = {}  # by the tensor's identity
        self._parked: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: torch.cuda.Event | None = None

    def park(self, tensors: Iterable[torch.Tensor], room: int | None = None) -> None:
        """Move contents to the host: of as many as it takes for `room` bytes to be free on a GPU; of all, where it is
        None or there is none. Nothing else may share their memory."""
        self.arrive()
        waiting = list(tensors)
        while waiting and (missing := self._missing(room)) > 0:
            lot: list[torch.Tensor] = []
            while waiting and missing > 0:
                lot.append(waiting.pop())
                missing -= lot[-1].nbytes
            self._move(lot)

    def leave(self) -> None:
        """Begin to move everything back; what reads or writes the tensors comes after `arrive`."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for tensor in self._parked:
                tensor.data = tensor.data.to(self.device, non_blocking=True, copy=True)
        self._parked.clear()
        if self._stream is not None:
            self._arrived = self._stream.record_event()

    def arrive(self) -> None:
        """Everything is back; on a GPU, for what is put on the current stream from now on."""
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
            self._arrived = None

    def _missing(self, room: int | None) -> float:
        if self.device.type != "cuda" or room is None:
            return float("inf")
        return room - bytes_free(self.device)

    def _move(self, tensors: Iterable[torch.Tensor]) -> None:
        moved = list(tensors)
        self._make_places(tensor for tensor in moved if not self._has_place(tensor))
        for tensor in moved:
            self._places[id(tensor)].copy_(tensor.detach(), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for tensor in moved:
            tensor.data = self._places[id(tensor)]
        self._parked += moved

    def _has_place(self, tensor: torch.Tensor) -> bool:
        place = self._places.get(id(tensor))
        return place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype)

    def _make_places(self, tensors: Iterable[torch.Tensor]) -> None:
        """Many tensors share a block of pinned memory, which torch rounds up to a power of two."""
        for lot in lots(tensors, _aligned, _BLOCK_BYTES):
            block = torch.empty(sum(map(_aligned, lot)), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            begin = 0
            for tensor in lot:
                self._places[id(tensor)] = block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                begin += _aligned(tensor)


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
