"""Interrupts a driver that is in a call for longer than the deadline: a stage that computes in its process, as all do
under --executor local, may never return.

    watchdog = Watchdog("run of quickstart", 3600.0, print_resume)
    with watchdog:              # raises Overdue at the deadline, wherever the main thread is
        watchdog.progressed()   # begins the time again
    watchdog.close()
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from pipeline.errors import Problem, StageError

LATE_S = 2.0  # beyond the deadline: a driver that looks itself every second is first
GRACE_S = 20.0  # from the interrupt to the end of the run, before the process is ended
SIGNAL = signal.SIGALRM


class Overdue(BaseException):
    """No task finished before the deadline. Not an Exception: a stage must not catch it."""


class Watchdog:
    """A thread that watches the main thread, and nothing in other threads: only that one can be interrupted. A call
    that returns to Python at no time, interrupt or not, is ended with the process, after the error and `last_words`.
    """

    def __init__(
        self, of: str, deadline_s: float, last_words: Callable[[], None], leave: Callable[[int], object] = os._exit
    ) -> None:
        self._of, self._deadline_s, self._last_words, self._leave = of, deadline_s, last_words, leave
        self._armed, self._since_s, self._lock, self._closed = False, 0.0, threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self.progressed()
        if threading.current_thread() is threading.main_thread():
            self._armed, self._before = True, signal.signal(SIGNAL, self._interrupt)
            self._thread = threading.Thread(target=self._watch, name="watches the deadline", daemon=True)
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:  # from now on the thread interrupts nobody
            self._armed = False

    def progressed(self) -> None:
        """Note that a task has finished."""
        self._since_s = time.monotonic()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._thread and not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            signal.signal(SIGNAL, self._before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            raise Overdue

    def _watch(self) -> None:
        while (left_s := self._since_s + self._deadline_s + LATE_S - time.monotonic()) > 0.0:
            if self._closed.wait(min(left_s, threading.TIMEOUT_MAX)):
                return
        with self._lock:
            if not self._armed:
                return
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        if not self._closed.wait(GRACE_S):
            error = StageError(
                Problem(
                    where=self._of,
                    what=f"no task finished in {self._deadline_s:g} s, and a call of the driver does not return",
                    why="every wait has a deadline, and a call outside Python cannot be interrupted",
                    fix="raise --deadline-s, or fix the stage that hangs",
                )
            )
            print(error, file=sys.stderr, flush=True)
            self._last_words()
            self._leave(error.exit_code)
