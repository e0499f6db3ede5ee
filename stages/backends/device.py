"""A worker's device and its memory: claimed once, lent to another process and reclaimed. Knows no model."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch

from ops.lots import lots
from pipeline import StageError, WorkerGroup
from pipeline.errors import Problem, counted

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP_BYTES = 1 << 30
_BLOCK_BYTES, _ALIGNMENT = 1 << 30, 512  # of pinned memory
_STAGED_BYTES = 1 << 26


def claim(group: WorkerGroup) -> torch.device:
    """Set up this worker's threads and memory, and return its device.

    Raises StageError if the group needs GPUs and torch sees none."""
    if group.gpus > 0 and not torch.cuda.is_available():
        raise StageError(
            Problem(
                where=str(group.location),
                what=f"worker group {group.name!r} needs {counted(group.gpus, 'GPU')} and torch sees none",
                why="a group with gpus above 0 computes on CUDA",
                fix="gpus=0 for the CPU, or a machine and a torch build with CUDA",
            )
        )
    if group.threads:
        torch.set_num_threads(group.threads)
    keep_freed_memory()
    return torch.device("cuda", torch.cuda.current_device()) if group.gpus > 0 else torch.device("cpu")


def keep_freed_memory() -> bool:
    """Raise glibc's malloc thresholds for this process. By default it returns large freed blocks to the kernel, so a
    small model's activations are mapped and page-faulted again in every step. Returns False for another C library."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))


def bytes_in_use(device: torch.device) -> int:
    """Bytes in use by all processes; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def release_unused(device: torch.device) -> None:
    """Return the blocks that torch's allocator keeps for later to the GPU, for other processes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def bytes_free(device: torch.device) -> int:
    """Free bytes of a GPU, after releasing this process's unused memory."""
    release_unused(device)
    return torch.cuda.mem_get_info(device)[0]


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to a device; to a GPU without waiting for the work that it has."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in ordinary host memory. From a GPU it goes through a small block of pinned memory: the
    driver alone would map the pages of the copy one by one (measured by benchmarks/checkpoint.py)."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True).contiguous()
    source = tensor.detach().contiguous()
    copied = torch.empty(source.shape, dtype=source.dtype)
    staged = torch.empty(_STAGED_BYTES, dtype=torch.uint8, pin_memory=True)  # torch keeps it for the next call
    parts = (whole.view(-1).view(torch.uint8).split(_STAGED_BYTES) for whole in (source, copied))
    for taken, given in zip(*parts, strict=True):
        arrived = staged[: taken.numel()].copy_(taken, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        given.copy_(arrived)
    return copied


class Parking:
    """Keeps tensors on the host while another process uses their device. They stay the same objects, so their holders
    can read and write them meanwhile. Host memory is kept for the next time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._places: dict[int, torch.Tensor] = {}  # by tensor identity
        self._parked: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: torch.cuda.Event | None = None

    def park(self, tensors: Iterable[torch.Tensor], room: int | None = None, *, constant: bool = False) -> None:
        """Move contents to the host: on a GPU only as many as needed to free `room` bytes; all of them if `room` is
        None or on a CPU. No other tensor may share their memory. What is `constant` is copied the first time only."""
        self.arrive()
        waiting = list(tensors)
        while waiting and (missing := self._missing(room)) > 0:
            lot: list[torch.Tensor] = []
            while waiting and missing > 0:
                lot.append(waiting.pop())
                missing -= lot[-1].nbytes
            self._move(lot, constant)

    def leave(self) -> None:
        """Start moving everything back. Call `arrive` before reading or writing the tensors."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for tensor in self._parked:
                tensor.data = tensor.data.to(self.device, non_blocking=True, copy=True)
        self._parked.clear()
        if self._stream is not None:
            self._arrived = self._stream.record_event()

    def arrive(self) -> None:
        """Wait until everything is back; on a GPU, makes the current stream wait."""
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
            self._arrived = None

    def _missing(self, room: int | None) -> float:
        if self.device.type != "cuda" or room is None:
            return float("inf")
        return room - bytes_free(self.device)

    def _move(self, moved: Sequence[torch.Tensor], constant: bool) -> None:
        fresh = [tensor for tensor in moved if not self._has_place(tensor)]
        self._make_places(fresh)
        for tensor in fresh if constant else moved:
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
        """Allocate pinned memory in blocks shared by many tensors, since torch rounds each up to a power of two."""
        for lot in lots(tensors, _aligned, _BLOCK_BYTES):
            block = torch.empty(sum(map(_aligned, lot)), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            begin = 0
            for tensor in lot:
                self._places[id(tensor)] = block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                begin += _aligned(tensor)


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
