"""Starts a process of ours beside a worker, with a socket to talk to it and the modules that the worker can import."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any


def import_path() -> list[str]:
    """The folders that this process imports from."""
    return [os.path.abspath(path or ".") for path in sys.path]


def companion(module: str, *, stdout: Any, stderr: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m MODULE FD` in a session of its own, with these files for what it prints. Returns the process
    and our end of its socket."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(theirs.fileno())],
        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
        start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(import_path())},
    )  # fmt: skip
    theirs.close()
    ours.setblocking(False)
    return process, ours
