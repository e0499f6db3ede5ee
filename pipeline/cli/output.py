"""Output that outlives its reader: a run goes on if the reader of its stdout or stderr leaves, as `head` does, if the
disk of its log is full, and if they are closed from the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


@contextmanager
def outliving(record: str) -> Iterator[None]:
    """Within the context, drop what is printed to a pipe that nobody reads any more, or that cannot be written. If it
    is stdout, say so once on stderr; `record` names where the output can be found."""
    before = sys.stdout, sys.stderr
    rest = f"the run goes on, and its record is in {record}"
    sys.stdout, sys.stderr = _TextStream(before[0], rest), _TextStream(before[1], "")
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def open_standard_files() -> None:
    """Open what is closed of standard input, output and error. The next file that a run opens would take its place, and
    get what libraries write there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def discard(stream: TextIO) -> None:
    """Let what is written to a stream go nowhere, what it has buffered included: its pipe is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _TextStream:
    """A text stream that writes to nowhere once its pipe is closed or its disk fails, and then says so on stderr."""

    def __init__(self, stream: TextIO, rest: str) -> None:
        self._stream, self._rest = stream, rest

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._leave(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._leave(error)

    def _leave(self, error: OSError) -> None:
        with suppress(OSError):
            discard(self._stream)
        if self._rest:
            pipe = isinstance(error, BrokenPipeError)
            why = "nobody reads the output any more" if pipe else f"the output cannot be written ({error.strerror})"
            print(f"{why}; {self._rest}", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
