"""Interrupts a driver that is in a call for longer than the deadline: a stage that computes in its process, as all do
under --executor local, may never return.

    watchdog = Watchdog("run of quickstart", 3600.0, print_resume)
    with watchdog.within():     # raises Overdue at the deadline, wherever the main thread is
        watchdog.progressed()   # begins the time again
    watchdog.close()
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pipeline.errors import Problem, StageError, leave_with

LATE_S = 2.0  # beyond the deadline: a driver that looks itself every second is first
GRACE_S = 20.0  # from the interrupt to the end of the run, before the process is ended
LONGEST_S = 1e6  # of a timer
LOOK_S = 0.2  # between two looks at a deadline that has passed while nobody watches
SIGNAL = signal.SIGALRM


class Overdue(BaseException):
    """No task finished before the deadline. Not an Exception: a stage must not catch it."""


class Watchdog:
    """Watches the main thread, and nothing in other threads: only that one can be interrupted. If a call does not
    return to Python after the interrupt either, a thread ends the process, after the error and `last_words`; not if the
    call holds Python's lock all the time, which no other thread can take."""

    def __init__(
        self, of: str, deadline_s: float, last_words: Callable[[], None], leave: Callable[[int], object] = os._exit
    ) -> None:
        self._of, self._deadline_s, self._last_words, self._leave = of, deadline_s, last_words, leave
        self._armed, self._since_s, self._allowed_s = False, 0.0, deadline_s
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def within(self, least_s: float = 0.0) -> Iterator[None]:
        """Raise Overdue in the context once nothing has progressed for the deadline, or `least_s` if that is longer."""
        self._allowed_s = max(self._deadline_s, least_s)
        self.progressed()
        if threading.current_thread() is threading.main_thread():
            if self._thread is None:
                self._before = signal.signal(SIGNAL, self._interrupt)
                self._thread = threading.Thread(target=self._watch, name="watches the deadline", daemon=True)
                self._thread.start()
            self._armed = True
            self._set_timer()
        try:
            yield
        finally:
            with self._lock:  # from now on the thread interrupts nobody
                self._armed = False
            if self._thread:
                signal.setitimer(signal.ITIMER_REAL, 0.0)

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
        if self._armed and self._left_s() <= 0.0:
            raise Overdue
        if self._armed:
            self._set_timer()

    def _interrupted(self) -> bool:
        """Interrupt the main thread if it is overdue, and return whether it is."""
        with self._lock:
            if not self._armed or self._left_s() > 0.0:
                return False
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            return True

    def _left_s(self) -> float:
        return self._since_s + self._allowed_s + LATE_S - time.monotonic()

    def _set_timer(self) -> None:
        """Let the system interrupt the main thread too: a regular expression looks for signals and lets no other thread
        run."""
        signal.setitimer(signal.ITIMER_REAL, min(max(self._left_s(), 0.001), LONGEST_S))

    def _watch(self) -> None:
        while not self._interrupted():
            if self._closed.wait(min(max(self._left_s(), LOOK_S), LONGEST_S)):
                return
        if not self._closed.wait(GRACE_S):
            error = StageError(
                Problem(
                    where=self._of,
                    what=f"no task finished in {self._allowed_s:g} s, and a call of the driver does not return",
                    why="every wait has a deadline, and a call outside Python cannot be interrupted",
                    fix="raise --deadline-s, or fix the stage that hangs",
                )
            )
            leave_with(error, self._last_words, self._leave)
