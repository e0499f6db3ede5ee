"""The session that a run's Ray has: finds it, and waits until nothing is left of it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from pipeline.executors.keeper import members


def session_of(driver: int) -> int:
    """Return the session of the Ray that a driver has started, or 0 before it has."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == driver and b"keeper.py" in (entry / "cmdline").read_bytes():
                return os.getsid(int(entry.name))
    return 0


def wait_until_empty(session: int, within_s: float = 15.0) -> None:
    """Wait until no process is left in a session."""
    assert session
    deadline_s = time.monotonic() + within_s
    while left := list(members(session)):
        if time.monotonic() > deadline_s:
            words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode() for pid in left}
            raise AssertionError(", ".join(f"{pid} {word}" for pid, word in words.items()))
        time.sleep(0.05)
