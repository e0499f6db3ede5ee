"""CPU seconds of this process and of every process that it started, from /proc. Knows no tasks.

usage = Usage()
driver_cpu_s, processes_cpu_s = usage.read()      # (0.0, 0.0) if read less than a second ago
"""

from __future__ import annotations

import os
import time
from pathlib import Path

EVERY_S = 1.0
PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Usage:
    """Reads at most once every `every_s`, because it visits every process on the machine. Returns 0 without /proc."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._last_s = float("-inf")

    def read(self) -> tuple[float, float]:
        """Return CPU seconds so far: of this process, and of it and its running descendants."""
        now_s = time.monotonic()
        if now_s - self._last_s < self._every_s or not PROC.is_dir():
            return 0.0, 0.0
        self._last_s = now_s
        return time.process_time(), tree_cpu_s(os.getpid())


def tree_cpu_s(root: int) -> float:
    """Return the CPU seconds of a process and its descendants."""
    children: dict[int, list[int]] = {}
    used_s: dict[int, float] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(entry)):
            pid = int(entry.name)
            children.setdefault(int(fields[1]), []).append(pid)
            used_s[pid] = (int(fields[11]) + int(fields[12])) * TICK_S
    total_s, todo = 0.0, [root]
    while todo:
        pid = todo.pop()
        total_s += used_s.get(pid, 0.0)
        todo += children.get(pid, ())
    return total_s


def _stat(entry: Path) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces; None if the process has ended."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
