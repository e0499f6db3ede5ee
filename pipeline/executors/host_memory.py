"""How much memory of the host this process may still take, from /proc and the control groups. Knows no tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes that the system and each control group of this process have left. Files that the system keeps
    in memory and may drop count as free. 0 if the system does not say."""
    return max(0, min([_system(proc), *_groups(proc, cgroups)]))


def _system(proc: Path) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what each control group leaves, from this process's own up to the root."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError, StopIteration):
                yield _left(folder, *(_V1 if controllers else _V2))
            if folder == root:
                break


def _left(folder: Path, limit: str, used: str, droppable: str) -> int:
    """Raises ValueError if the group has no limit."""
    most = int((folder / limit).read_text())
    stat = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    kept = next(int(value) for name, value in stat if name == droppable)
    return most - int((folder / used).read_text()) + kept
