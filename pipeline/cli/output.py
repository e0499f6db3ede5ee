"""Output that outlives its reader: a run goes on if the reader of its stdout or stderr leaves, as `head` does, or stops
reading, if the disk of its log is full, and if they are closed from the start."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_KEPT: list[_TextStream] = []  # a thread of user code may be printing to one, and `print` does not hold it itself
_FAILS = (OSError, ValueError, AttributeError)  # user code has closed the stream below, or put its own there
FULL_S = 10.0  # how long a run waits for a reader that does not read, once


@contextmanager
def outliving(record: str) -> Iterator[None]:
    """Within the context, drop what is printed to a pipe that nobody reads, or that cannot be written. If it is stdout,
    say so once on stderr; `record` names where the output can be found."""
    before = _opened(sys.stdout), _opened(sys.stderr)
    rest = f"the run goes on, and its record is in {record}"
    ours = sys.stdout, sys.stderr = _TextStream(before[0], rest), _TextStream(before[1], "")
    _KEPT.extend(ours)
    try:
        yield
    finally:
        for stream in ours:  # user code may have put others in their place
            stream.end()
        sys.stdout, sys.stderr = map(_opened, before)


def open_standard_files() -> None:
    """Open what is closed of standard input, output and error. The next file that a run opens would take its place, and
    get what libraries write there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdout, sys.stderr = _opened(sys.stdout), _opened(sys.stderr)


def _opened(stream: TextIO | None) -> TextIO:
    """Return the stream, or one that goes nowhere if user code has closed it."""
    return stream if stream and not getattr(stream, "closed", False) else open(os.devnull, "w")


def discard(stream: TextIO) -> None:
    """Let what is written to a stream go nowhere, what it has buffered included: its pipe is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _TextStream:
    """A text stream that writes to nowhere once its pipe is closed or its disk fails, and while its pipe is full, and
    then says so on stderr. User code cannot close it."""

    def __init__(self, stream: TextIO, rest: str) -> None:
        self._stream, self._rest, self._wait_s, self._said = stream, rest, FULL_S, ""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text) if self._takes() else len(text)
        except _FAILS as error:
            self._leave(error)
            return len(text)

    def flush(self) -> None:
        try:
            if self._takes():
                self._stream.flush()
        except _FAILS as error:
            self._leave(error)

    def close(self) -> None:
        self.flush()

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return bool(getattr(self._stream, "isatty", bool)())

    def end(self) -> None:
        """Flush, or discard what is left: at the exit of the process the flush would wait for the reader."""
        self.flush()
        if not self._takes():
            self._discard()

    def _takes(self) -> bool:
        """Return whether the stream can be written without waiting, for more than `FULL_S` in all, for its reader."""
        try:
            ready = select.select([], [self._stream.fileno()], [], self._wait_s)[1]
        except _FAILS:  # it has no file, or writing says what is wrong
            return True
        if not ready:
            self._wait_s = 0.0
            self._say(f"nobody has read the output for {FULL_S:g} s")
        return bool(ready)

    def _leave(self, error: Exception) -> None:
        self._discard()
        pipe, why = isinstance(error, BrokenPipeError), getattr(error, "strerror", error)
        self._say("nobody reads the output any more" if pipe else f"the output cannot be written ({why})")

    def _discard(self) -> None:
        with suppress(*_FAILS):
            discard(self._stream)

    def _say(self, why: str) -> None:
        if self._rest and why != self._said:
            self._said = why
            print(f"{why}; {self._rest}", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
