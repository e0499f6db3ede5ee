"""The processes that a process has started, and those that they have started: found in /proc, and ended."""

from __future__ import annotations

import ctypes
import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt() -> None:
    """From now on, processes whose parents have ended become children of this one."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """All processes below this one, whatever session they are in."""
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children[int(path.read_text(errors="replace").rpartition(")")[2].split()[1])].append(int(path.parent.name))
    found, left = [], [pid]
    while left:
        left = [child for parent in left for child in children[parent]]
        found += left
    return found


def kill(pid: int) -> None:
    """Kill the session that this process leads, and all processes below it."""
    below = descendants(pid)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for child in below:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def end_all() -> None:
    """Kill and reap all processes below this one, and those that become its children meanwhile."""
    while children := descendants(os.getpid()):
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
