"""Keeps freed memory in the process. Activations of small models are freed and taken again thousands of times a second;
glibc by default returns large blocks to the kernel each time, and the page faults cost more than the arithmetic."""

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
