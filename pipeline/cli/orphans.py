"""Ends what user code has started and left running, once the process of a run has ended, however it ends.

    leave_none()    # from now on

A watcher in a session of its own looks at the descendants of a process now and then, and at its end. What it has not
seen then carries a variable in its environment, or is a copy of the process and has said its number. When the process
has ended, the watcher kills all those that are still in its session. Under Ray, `executors.keeper` does this for the
workers.

This file is run as a script, and then imports nothing of Sluice.
"""

from __future__ import annotations

import atexit
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
POLL_S = 1.0  # between looks at whether the process lives, and at what it has started
PIPE = 4096  # bytes that a pipe takes at once
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

    def say_all() -> None:
        """Say the numbers of all descendants, at the end of this process."""
        with suppress(OSError):
            os.write(writer, b"".join(f"{pid}\n".encode() for pid in _descendants(os.getpid(), os.getsid(0)))[:PIPE])

    os.register_at_fork(after_in_child=say)
    atexit.register(say_all)


def _watch(mark: str, process: int, session: int) -> None:
    """Wait until the process, which has started this one, has ended. Then kill what it left."""
    said, looked_s = b"", time.monotonic()
    seen: dict[int, str] = {}  # processes, with when they have begun
    while os.getppid() == process:
        ready = select.select([0], [], [], POLL_S)[0]
        if time.monotonic() - looked_s >= POLL_S:
            looked_s = time.monotonic()
            seen = {pid: begun for pid, begun in seen.items() if _begun(pid) == begun}
            seen |= {pid: _begun(pid) for pid in _descendants(process, session) if pid not in seen}
        if not ready:
            continue
        if not (part := os.read(0, 1 << 12)):  # it has closed the pipe, maybe as it ends
            time.sleep(LOOK_S)
        *lines, said = (said + part).split(b"\n")
        seen |= {pid: _begun(pid) for pid in map(int, lines)}
    deadline_s = time.monotonic() + LEFT_S
    while (left := list(_left(mark.encode(), seen, session))) and time.monotonic() < deadline_s:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _descendants(process: int, session: int) -> Iterator[int]:
    """Yield the processes of the session that a process has started, and what those have started, as far as the system
    tells."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):  # hundreds under Ray
            for pid in map(int, _children(f"/proc/{process}/task/{thread}/children")):
                if os.getsid(pid) == session:
                    yield pid
                    yield from _descendants(pid, session)


def _children(file: str) -> list[bytes]:
    with suppress(OSError):
        opened = os.open(file, os.O_RDONLY)
        try:
            return os.read(opened, 1 << 16).split()
        finally:
            os.close(opened)
    return []


def _left(mark: bytes, seen: dict[int, str], session: int) -> Iterator[int]:
    """Yield the processes of the session that carry the mark, or were seen."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            with suppress(OSError):
                ours = seen.get(pid) == _begun(pid) or mark in (entry / "environ").read_bytes()
                if ours and os.getsid(pid) == session and _state(entry) != "Z":
                    yield pid


def _begun(pid: int) -> str:
    """Return when a process has begun; "" if it has ended."""
    with suppress(OSError):
        return _fields(Path(f"/proc/{pid}"))[19]
    return ""


def _state(entry: Path) -> str:
    return _fields(entry)[0]


def _fields(entry: Path) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program."""
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
