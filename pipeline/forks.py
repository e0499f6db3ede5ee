"""Keeps copies of a process that user code forks out of its run, and user code from ending or replacing its process.

A copy that came back from that code would go on with the run, and write to its record and to its data plane. A copy
that lives on holds the files of its original open, and a process that waits for the end of such a pipe would wait.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

STDERR, ENDED = 2, 70  # the exit code of a copy that we end: EX_SOFTWARE of sysexits.h
exit_now = os._exit  # as it is before user code is kept from it
ENDING = ("_exit", "abort", "execv", "execve")  # functions of os: the run would end without a word, or with exit code 0
_thread = threading.local()  # `original`: the process whose run is in user code in this thread
_kept: int | None = None  # the process in which no thread but ours may end it


class Original:
    """The process that makes it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        _guard()

    @contextmanager
    def only(self, whose: str) -> Iterator[None]:
        """Run user code in the context, which only the original leaves; `whose` is a stage, or a file. In it, `ENDING`
        raise RuntimeError in the original."""
        before, _thread.original = getattr(_thread, "original", None), self._pid
        try:
            yield
        finally:
            _thread.original = before
            self.check(whose)

    def check(self, whose: str) -> None:
        """End this process if it is a copy."""
        if os.getpid() == self._pid:
            return
        said = f"process {os.getpid()}, which {whose!r} forked, came back from its code: it ends; end it with "
        with suppress(OSError):
            os.write(STDERR, f"{said}os._exit(0)\n".encode())
        exit_now(ENDED)


@contextmanager
def kept() -> Iterator[None]:
    """In the context, `ENDING` raise RuntimeError in all threads of this process, except for `exit_now`."""
    before = _kept
    keep(os.getpid())
    try:
        yield
    finally:
        keep(before)


def keep(process: int | None) -> None:
    """From now on, let `ENDING` raise RuntimeError in all threads of this process; None: let them work."""
    global _kept
    _guard()
    _kept = process


def closed_in_copies(file: IO[bytes]) -> None:
    """Close a file, in which nothing is left to write, in each copy of this process from now on."""

    def close() -> None:
        with suppress(OSError):
            file.close()

    os.register_at_fork(after_in_child=close)


@functools.cache
def _guard() -> None:
    """Put a check before each function of `ENDING`."""
    for name in ENDING:
        setattr(os, name, _guarded(name, getattr(os, name)))


def _guarded(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        if os.getpid() in (_kept, getattr(_thread, "original", None)):
            raise RuntimeError(f"os.{name} would end the process of the run")
        return function(*given, **named)

    return checked
