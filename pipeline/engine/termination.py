"""Handles SIGTERM: the first asks a run to stop, a second ends it at once.

    with Termination() as termination:
        Engine(..., termination=termination).execute()

Only the main thread can install the handler. In other threads signal handling is unchanged; set `asked` directly.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STDERR = 2
NOTICE = b"SIGTERM: the step in training will be finished and saved; a second SIGTERM ends the run at once\n"
EXIT_CODE = 128 + signal.SIGTERM  # what shells report for a process that SIGTERM ended


class Termination:
    """`asked` is true once the run should stop."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def install(self) -> None:
        """Install the handler, also over one installed in the meantime. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._take)
            if self._before is None:
                self._before = before

    def __enter__(self) -> Termination:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def over(self) -> None:
        """Ignore SIGTERM from now on: the run has ended, and its final output should be complete."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a third one ends the process at once
            raise SystemExit(EXIT_CODE)
        self.asked = True
        os.write(STDERR, NOTICE)  # unbuffered: the signal may have interrupted a buffered write
