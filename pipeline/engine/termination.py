"""Handles the signals that ask a run to end: the first one asks it to stop, a second one ends it at once.

    with Termination() as termination:
        Driver(..., termination=termination).execute()

SIGTERM comes from schedulers and `timeout`, SIGHUP from a terminal that closes, SIGINT from Ctrl-C, SIGQUIT from
Ctrl-\\. A signal that is ignored when the process starts, as SIGHUP is under nohup, stays ignored. While workers start,
no step is in training, and the first signal ends the run. Only the main thread can install handlers. In other threads
signal handling is unchanged; set `asked` directly.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from pipeline.errors import in_main_thread
from pipeline.screen import error_file

AT_ONCE_S = 10.0  # from a second signal to the end of the process, whatever holds it up
LAST_S = 5.0  # from a signal to the end of a process whose run is over: nobody may read its last output
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class Termination:
    """`asked` is true once the run should stop; `exit_code` is what shells report for a process that the first signal
    ended, 128 + its number. `leave`, if given, ends the process where the run does not end in time."""

    def __init__(self, leave: Callable[[int], object] | None = None) -> None:
        self.asked, self._leave = False, leave
        self.exit_code = 128 + signal.SIGTERM
        self._starting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Termination:
        if in_main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
            os.register_at_fork(after_in_child=self._restore)  # a signal to a copy is not one to the run
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        """Handle signals as before. Idempotent."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """End the run at the first signal within the context: its workers start, and there is nothing to save."""
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    def over(self) -> None:
        """Let a signal end the process `LAST_S` later from now on: the run has ended, and its last output should be
        complete."""
        for number in self._before:
            signal.signal(number, self._take_late)

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.asked:
            signal.signal(number, signal.SIG_DFL)  # a third one ends the process without a word
            self._leave_in(AT_ONCE_S, self.exit_code)
            raise SystemExit(self.exit_code)
        self.asked, self.exit_code = True, 128 + number
        if self._starting:
            _say(f"{name}: the run ends; its workers are still starting\n")
            raise SystemExit(self.exit_code)
        _say(f"{name}: a step in training, if any, will be finished and saved; a second {name} ends the run at once\n")

    def _take_late(self, number: int, frame: FrameType | None) -> None:
        self._leave_in(LAST_S, self.exit_code if self.asked else 128 + number)

    def _leave_in(self, wait_s: float, code: int) -> None:
        """End the process after this time, if it has not ended by then: a disk or a reader may hold it up."""
        if (end := self._leave) is None:
            return

        def leave() -> None:
            _say(f"not ended {wait_s:g} s after a signal: the process ends now\n")
            end(code)

        timer = threading.Timer(wait_s, leave)
        timer.daemon = True
        timer.start()


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may have closed
        os.write(error_file(), text.encode())  # unbuffered: the signal may have interrupted a buffered write
