"""Interrupts a driver that is in a call for longer than the deadline: a stage that computes in its process, as all do
under --executor local, may never return.

    watchdog = Watchdog(3600.0, print_resume)
    with watchdog.within(error_at):  # raises what that returns at the deadline, wherever the main thread is
        watchdog.progressed()        # begins the time again
    watchdog.close()
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

from msgspec.structs import replace

from pipeline.errors import Overdue, SluiceError, in_main_thread, leave_with, line_of_frame, user_line
from pipeline.forks import exit_now

LATE_S = 2.0  # beyond the deadline: a driver that looks itself every second is first
GRACE_S = 45.0  # from the interrupt to the end of the run, before the process is ended; Ray may take 30 s to close
LOCKED_S = 30.0  # beyond all that, before a process in which no thread runs is ended
LONGEST_S = 1e6  # of a timer
LOOK_S = 0.2  # between two looks at a deadline that has passed while nobody watches
SIGNAL = signal.SIGALRM
ErrorAt: TypeAlias = Callable[[str], SluiceError]  # from the line of the user's code that hangs, "" if it is not theirs


class Watchdog:
    """Watches the main thread, and nothing in other threads: only that one can be interrupted. If a call does not
    return to Python after the interrupt either, a thread ends the process, after the error and `last_words`. If the
    call also keeps Python's lock, so that no thread runs, faulthandler prints its lines and ends the process."""

    def __init__(
        self, deadline_s: float, last_words: Callable[[], None], leave: Callable[[int], object] = exit_now
    ) -> None:
        self._deadline_s, self._last_words, self._leave = deadline_s, last_words, leave
        self._armed, self._raised, self._since_s, self._allowed_s = False, False, 0.0, deadline_s
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def within(self, error_at: ErrorAt, least_s: float = 0.0) -> Iterator[None]:
        """Raise an error in the context once nothing has progressed for the deadline, or `least_s` if that is longer.
        `error_at` makes it, maybe in another thread."""
        self._allowed_s, self._error_at = max(self._deadline_s, least_s), error_at
        self.progressed()
        if in_main_thread():
            if self._thread is None:
                self._before = signal.signal(SIGNAL, self._interrupt)
                self._thread = threading.Thread(target=self._watch, name="watches the deadline", daemon=True)
                self._thread.start()
            self._armed, self._raised = True, False
            self._set_timer()
        try:
            yield
        except Overdue as overdue:
            raise error_at(user_line(overdue)) from overdue
        finally:
            with self._lock:  # from now on the thread interrupts nobody
                self._armed = False
            if self._thread:
                signal.setitimer(signal.ITIMER_REAL, 0.0)

    def progressed(self) -> None:
        """Note that a task has finished. Takes the signal back, if code of the task has taken it."""
        self._since_s = time.monotonic()
        if self._armed and signal.getsignal(SIGNAL) != self._interrupt and in_main_thread():
            signal.signal(SIGNAL, self._interrupt)
            self._set_timer()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._thread and not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            signal.signal(SIGNAL, self._before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._armed or self._raised:
            return
        if self._left_s() > 0.0:
            return self._set_timer()
        self._raised = True  # once: the timer and the thread both interrupt
        raise Overdue

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
        try:
            self._wait()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _wait(self) -> None:
        while not self._interrupted():
            wait_s = min(max(self._left_s(), LOOK_S), LONGEST_S)
            # needs no lock of Python's; called again before its time while this thread runs
            faulthandler.dump_traceback_later(wait_s + GRACE_S + LOCKED_S, exit=True, file=2)
            if self._closed.wait(wait_s):
                return
        if not self._closed.wait(GRACE_S):
            error = self._error_at(line_of_frame(sys._current_frames().get(threading.main_thread().ident or 0)))
            why = "the call was interrupted and does not return"
            said = (replace(problem, why=f"{problem.why}; {why}") for problem in error.problems)
            leave_with(type(error)(*said), self._last_words, self._leave)
