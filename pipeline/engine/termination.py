"""SIGTERM: the first asks a run to stop, a second one ends it now.

    with Termination() as termination:
        Engine(..., termination=termination).execute()

Only the main thread of a process can have it; elsewhere signals stay what they are, and `asked` is set by hand.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STDERR = 2
TOLD = b"SIGTERM: the step that is being trained is finished and saved; a second SIGTERM ends the run now\n"
EXIT_CODE = 128 + signal.SIGTERM  # what shells say of a process that SIGTERM ended


class Termination:
    """`asked` is true once the run is to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def install(self) -> None:
        """Take SIGTERM over, also from a handler installed in the meantime."""
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
        """The run has ended: nothing is left to stop, and what is said of it at last is said to the end."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a third one waits for nothing
            raise SystemExit(EXIT_CODE)
        self.asked = True
        os.write(STDERR, TOLD)  # a buffer may be in use where this came
