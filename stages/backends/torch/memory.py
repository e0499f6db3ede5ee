"""Keeps freed memory in the process. By default glibc returns large blocks to the kernel when they are freed, so the
activations of a small model are mapped, and their pages faulted in, again at every step."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process. False where the C library is another one."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))
