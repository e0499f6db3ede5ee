"""CPU seconds of this process and of every process that it started, from /proc. Knows no task.

usage = Usage()
driver_cpu_s, processes_cpu_s = usage.read()      # (0.0, 0.0) where it was read less than a second ago
"""

from __future__ import annotations

import os
import time
from pathlib import Path

EVERY_S = 1.0
PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Usage:
    """Reads at most once a second: it looks at every process of the machine. Where there is no /proc it reads 0."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._last_s = float("-inf")

    def read(self) -> tuple[float, float]:
        """CPU seconds so far: of this process, and of it and all that it started and that still run."""
        now_s = time.monotonic()
        if now_s - self._last_s < self._every_s or not PROC.is_dir():
            return 0.0, 0.0
        self._last_s = now_s
        return time.process_time(), tree_cpu_s(os.getpid())


def tree_cpu_s(root: int) -> float:
    """CPU seconds of a process and of its descendants."""
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
    """The fields of /proc/PID/stat behind the name, which may hold spaces; None where the process has just ended."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
