"""Ends what user code has started and left running, once the process of a run has ended, however it ends.

    leave_none()    # from now on

What a process starts carries a variable in its environment, and a copy of it that user code forks says its number. When
the process has ended, a watcher in a session of its own kills all those that are still in the session of the process: a
service that is meant to stay is started in a session of its own. Under Ray, `executors.keeper` does this for the
workers.

This file is run as a script, and then imports nothing of Sluice.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "SLUICE_PROCESS"  # the variable
POLL_S = 1.0  # between looks at whether the process lives
LEFT_S, LOOK_S = 5.0, 0.05  # how long to look for what a killed process has just started, and how often
_watcher: subprocess.Popen[bytes] | None = None


def leave_none() -> None:
    """Start the watcher of this process, unless it has one."""
    global _watcher
    if _watcher:
        return
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    reader, writer = os.pipe()
    command = [sys.executable, "-P", "-S", __file__, mark, str(os.getpid()), str(os.getsid(0))]
    with open(os.devnull, "r+b") as nowhere:
        _watcher = subprocess.Popen(command, stdin=reader, stdout=nowhere, stderr=nowhere, start_new_session=True)
    os.close(reader)
    os.environ[MARK] = mark

    def say() -> None:
        """Say the number of this copy."""
        with suppress(OSError):  # user code may have closed the pipe
            os.write(writer, f"{os.getpid()}\n".encode())

    os.register_at_fork(after_in_child=say)


def _watch(mark: str, process: int, session: int) -> None:
    """Wait until the process, which has started this one, has ended. Then kill what it left."""
    said, copies = b"", {}
    while os.getppid() == process:
        if not select.select([0], [], [], POLL_S)[0]:
            continue
        if not (part := os.read(0, 1 << 12)):  # it has closed the pipe, maybe as it ends
            time.sleep(LOOK_S)
        *lines, said = (said + part).split(b"\n")
        for pid in map(int, lines):
            copies[pid] = _begun(Path(f"/proc/{pid}"))
    deadline_s = time.monotonic() + LEFT_S
    while (left := list(_left(mark.encode(), copies, session))) and time.monotonic() < deadline_s:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _left(mark: bytes, copies: dict[int, str], session: int) -> Iterator[int]:
    """Yield the processes of the session that carry the mark, or are among the copies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            with suppress(OSError):
                if os.getsid(pid) == session and _state(entry) != "Z":
                    copied = pid in copies and copies[pid] == _begun(entry)
                    if copied or mark in (entry / "environ").read_bytes():
                        yield pid


def _begun(entry: Path) -> str:
    """Return when a process has begun; "" if it has ended."""
    with suppress(OSError):
        return _fields(entry)[19]
    return ""


def _state(entry: Path) -> str:
    return _fields(entry)[0]


def _fields(entry: Path) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program."""
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
