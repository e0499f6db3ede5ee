"""The screen of a run, and how what libraries print while they load is kept off it.

    with aside(run_dir.log("sampler", 0)):
        load()             # what it and the processes that it starts print goes into that log
        say("starting\\n")  # still on the screen

What a library keeps of the output, as a logger does, stays the log's.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

OUT, ERR = 1, 2
UNKNOWN = 80  # columns, where no terminal says how many


@dataclass(frozen=True, kw_only=True)
class _Screen:
    """Where the output went before: Python's streams, and copies of the file descriptors."""

    streams: tuple[TextIO, TextIO]
    files: tuple[int, int]
    is_file: bool  # whether stdout wrote to its file descriptor


_screens: list[_Screen] = []


@contextmanager
def aside(log: Path) -> Iterator[None]:
    """Within the context, what this process prints goes to the end of a log."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    screen = _Screen(streams=streams, files=(os.dup(OUT), os.dup(ERR)), is_file=_number(streams[0]) == OUT)
    with log.open("ab") as file:
        os.dup2(file.fileno(), OUT)
        os.dup2(file.fileno(), ERR)
    sys.stdout, sys.stderr = _Log(log, OUT), _Log(log, ERR)
    _screens.append(screen)
    try:
        yield
    finally:
        back()


def back() -> None:
    """Print to the screen again. Idempotent."""
    while _screens:
        screen = _screens.pop()
        sys.stdout, sys.stderr = screen.streams
        for kept, number in zip(screen.files, (OUT, ERR)):
            os.dup2(kept, number)
            os.close(kept)


def say(text: str) -> None:
    """Print to the screen, also within `aside`: there not if that would have to wait for a reader."""
    screen = _screens[-1] if _screens else None
    if screen is None or not screen.is_file:
        print(text, end="", flush=True, file=screen.streams[0] if screen else None)
        return
    with suppress(OSError):
        if select.select([], [screen.files[0]], [], 0.0)[1]:
            os.write(screen.files[0], text.encode(errors="replace"))


def columns() -> int:
    """Return how wide the screen is now, also within `aside`; `UNKNOWN` if it has no width."""
    try:
        return os.get_terminal_size(_screens[-1].files[0] if _screens else OUT).columns or UNKNOWN
    except OSError:
        return UNKNOWN


def error_file() -> int:
    """Return the file descriptor that writes errors to the screen."""
    return _screens[-1].files[1] if _screens else ERR


class _Log(io.TextIOBase):
    """A stream that appends to a file and holds none open: loggers keep it for as long as they live."""

    def __init__(self, path: Path, number: int) -> None:
        self._path, self._file = path, number

    def write(self, text: str) -> int:
        with suppress(OSError), self._path.open("a", errors="backslashreplace") as file:
            file.write(text)
        return len(text)

    def fileno(self) -> int:
        return self._file


def _number(stream: TextIO) -> int:
    """Return the file descriptor of a stream, or -1."""
    try:
        return stream.fileno()
    except (OSError, AttributeError, ValueError):
        return -1
