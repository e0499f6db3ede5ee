"""Ends a command of ours at Ctrl-C while its modules are still imported: with the word and the exit code with which
`pipeline.cli.command` ends it from then on, and no traceback. Does nothing in a program that imports `pipeline`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from pipeline import precedence

INTERRUPTED, INTERRUPTED_CODE = "interrupted", 130
STDERR = 2


def started() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: from now on it is caught."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(STDERR, f"{INTERRUPTED}\n".encode())
    os._exit(INTERRUPTED_CODE)


_is_command = precedence.BY_MODULE or Path(*sys.argv[:1]).name == precedence.SCRIPT
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in the background
    signal.signal(signal.SIGINT, _end)
