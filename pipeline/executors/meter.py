"""CPU seconds of this process, told apart by task. Knows no tasks, only that they begin and end.

A task that runs to its end without awaiting has all of the process meanwhile; streams share what is left evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Meter:
    """`clock` gives the CPU seconds of the process, over all of its threads."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._last_s = clock()
        self._spent_s: dict[int, float] = {}  # of the tasks that are open
        self._alone: list[int] = []  # those that have the process to themselves, the innermost last

    def begin(self, task: int, *, alone: bool) -> None:
        """A task begins. One that is `alone` does not await."""
        self._share()
        self._spent_s[task] = 0.0
        if alone:
            self._alone.append(task)

    def end(self, task: int) -> float:
        """A task is over; the CPU seconds that it took."""
        self._share()
        if task in self._alone:
            self._alone.remove(task)
        return self._spent_s.pop(task)

    def _share(self) -> None:
        now_s = self._clock()
        running = self._alone[-1:] or list(self._spent_s)
        for task in running:
            self._spent_s[task] += (now_s - self._last_s) / len(running)
        self._last_s = now_s
