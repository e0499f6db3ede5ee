"""CPU seconds of this process by task. Knows only when tasks begin and end.

A task that never awaits is charged all CPU time while it runs; streams split the rest evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Meter:
    """`clock` returns the CPU seconds of the process over all threads."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._last_s = clock()
        self._spent_s: dict[int, float] = {}  # of open tasks
        self._alone: list[int] = []  # tasks that have the process to themselves, innermost last

    def begin(self, task: int, *, alone: bool) -> None:
        """Start a task. A task that is `alone` never awaits."""
        self._share()
        self._spent_s[task] = 0.0
        if alone:
            self._alone.append(task)

    def end(self, task: int) -> float:
        """End a task. Returns its CPU seconds."""
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
