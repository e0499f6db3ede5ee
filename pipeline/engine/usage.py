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
    """Reads at most once every `every_s`. Returns 0 without /proc."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._last_s = float("-inf")
        self._tree = ProcessTree(os.getpid())

    def read(self) -> tuple[float, float]:
        """Return CPU seconds so far: of this process, and of it and its running descendants."""
        now_s = time.monotonic()
        if now_s - self._last_s < self._every_s or not PROC.is_dir():
            return 0.0, 0.0
        self._last_s = now_s
        return time.process_time(), self._tree.cpu_s()


class ProcessTree:
    """A process and its descendants. A process that is none of them does not become one, so it is read only once."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._others: set[int] = set()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all that run."""
        children: dict[int, list[int]] = {}
        used_s: dict[int, float] = {}
        running = {int(name) for name in os.listdir(PROC) if name.isdigit()}
        self._others &= running
        for pid in running - self._others:
            if fields := _stat(pid):
                children.setdefault(int(fields[1]), []).append(pid)
                used_s[pid] = (int(fields[11]) + int(fields[12])) * TICK_S
        total_s, todo, found = 0.0, [self._root], set[int]()
        while todo:
            pid = todo.pop()
            found.add(pid)
            total_s += used_s.get(pid, 0.0)
            todo += children.get(pid, ())
        self._others |= used_s.keys() - found
        return total_s


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces; None if the process has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
