"""A clock that jumps from one event to the next. Knows timers and machines, but not their purpose.

    clock = VirtualClock([Machine(cores=2)])
    clock.at(1.5, print, "half past one")
    clock.run()                                  # until a call returns a true value or no event is left

The message of a mark on a machine's lane is (call, arguments), as for a timer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from pipeline.simulation.sharing import Machine


class VirtualClock:
    """A virtual clock. `now_s` is the time of the current event. Simultaneous timers run in the order they were set."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.now_s = self.wall_s = 0.0
        self._machines = tuple(machines)
        self._timers: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, at_s: float, call: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call at a time that is not before now."""
        heapq.heappush(self._timers, (at_s, next(self._order), call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call in `seconds` from now."""
        heapq.heappush(self._timers, (self.now_s + seconds, next(self._order), call, arguments))

    def run(self) -> bool:
        """Process events until a call returns a true value; return True then, or False if no event is left."""
        machines, timers = self._machines, self._timers
        while True:
            timer_s = timers[0][0] if timers else math.inf
            machine = min(machines, key=Machine.next_s) if len(machines) > 1 else machines[0]
            mark_s = machine.next_s()
            if mark_s < timer_s:
                self.now_s = mark_s
                call, arguments = machine.pop(mark_s)
            elif timers:
                self.now_s, _, call, arguments = heapq.heappop(timers)
            else:
                return False
            if call(*arguments):
                return True
