"""Output that outlives its reader: a run goes on if the reader of its stdout or stderr leaves, as `head` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


@contextmanager
def outliving(record: str) -> Iterator[None]:
    """Within the context, drop what is printed to a pipe that nobody reads any more. If it is stdout, say so once on
    stderr; `record` names where the output can be found."""
    before = sys.stdout, sys.stderr
    gone = f"nobody reads the output any more; the run goes on, and its record is in {record}"
    sys.stdout, sys.stderr = _TextStream(before[0], gone), _TextStream(before[1], "")
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def discard(stream: TextIO) -> None:
    """Let what is written to a stream go nowhere, what it has buffered included: its pipe is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _TextStream:
    """A text stream that writes to nowhere once its pipe is closed, and then says so on stderr."""

    def __init__(self, stream: TextIO, gone: str) -> None:
        self._stream, self._gone = stream, gone

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        with suppress(OSError):
            discard(self._stream)
        if self._gone:
            print(self._gone, file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
