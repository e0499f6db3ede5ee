"""Counts the memory that one end of a refit allocates on its device: what it keeps, and the most at one time.

    ledger = Ledger(device)
    with ledger.counting():                       # around everything that allocates
        slot = ledger.empty(1 << 20)
    ledger.record("target")                       # {"kept_bytes_target": ..., "peak_bytes_target": ...}

On a CPU it counts what is allocated through it, until that is freed. On a GPU it reads torch's statistics of this
process, so a stage that allocates at the same time is counted too. Weights that the model itself holds, and another
process's memory, do not count.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class Ledger:
    """Bytes of one end on `device`. `begin` starts a version: the peak is the largest number since then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._now_bytes = self._peak_bytes = 0
        self._lock = threading.RLock()  # RLock: memory may be freed while a number is being added

    def begin(self) -> None:
        """Start a version."""
        with self._lock:
            self._peak_bytes = self._now_bytes

    def empty(self, size: int) -> torch.Tensor:
        """Return `size` uninitialized flat bytes on the device."""
        if self.device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        owner = np.empty(size, np.uint8)  # lives exactly as long as the tensor's storage
        self.follow(owner, size)
        return torch.from_numpy(owner)

    def follow(self, owner: object, size: int) -> None:
        """Count `size` bytes of CPU memory until its owner is freed."""
        self._add(size)
        weakref.finalize(owner, self._add, -size).atexit = False

    def briefly(self, size: int) -> None:
        """Count `size` bytes of CPU memory that are freed before the version ends."""
        if self.device.type == "cpu":
            with self._lock:
                self._peak_bytes = max(self._peak_bytes, self._now_bytes + size)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what a GPU allocates inside this context; a CPU counts always."""
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before_bytes, _ = self._on_gpu()
        try:
            yield
        finally:
            after_bytes, most_bytes = self._on_gpu()
            with self._lock:
                self._peak_bytes = max(self._peak_bytes, self._now_bytes + most_bytes - before_bytes)
                self._now_bytes += after_bytes - before_bytes

    def record(self, side: str) -> dict[str, float]:
        """Return both numbers as metrics of a side, in bytes."""
        return {f"kept_bytes_{side}": float(self._now_bytes), f"peak_bytes_{side}": float(self._peak_bytes)}

    def _add(self, size: int) -> None:
        with self._lock:
            self._now_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._now_bytes)

    def _on_gpu(self) -> tuple[int, int]:
        """Return the bytes that torch has allocated on the GPU, and the most since the last reset."""
        found = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not found:  # nothing was allocated yet
            return 0, 0
        return found["allocated_bytes"]["all"]["current"], found["allocated_bytes"]["all"]["peak"]
