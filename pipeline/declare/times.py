"""How the time of a sample was spent, as a stage notes it: parts with names, one after the other.

times = SampleTimes()                 # begins now
times.until(QUEUE)                    # it waited until now,
times.until(GENERATE)                 # and was sampled until now
times.during = lambda: ENVIRONMENT    # what it is in, until the next `until`
yield Output(columns=..., index=[3], times={3: times})
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import isfinite

QUEUE = "queue"  # waits to be sampled, with the turns of other episodes
GENERATE = "generate"  # is sampled
PROCESS = "process"  # waits for a process of its environment
ENVIRONMENT = "environment"  # its environment works
WORKER = "worker"  # its worker tokenizes, or is busy with other samples


class SampleTimes:
    """The parts of a sample's time, in seconds of the machine's monotonic clock. A name is any text; the analysis knows
    those above. `during` may say which part it is in, before that part has ended."""

    __slots__ = ("during", "parts", "start_s")

    def __init__(self, start_s: float | None = None) -> None:
        self.start_s = time.monotonic() if start_s is None else start_s
        self.parts: list[tuple[str, float]] = []  # names, and their ends
        self.during: Callable[[], str] | None = None

    @property
    def end_s(self) -> float:
        """The end of the last part."""
        return self.parts[-1][1] if self.parts else self.start_s

    def seconds(self, name: str) -> float:
        """Return how long it was in parts of this name."""
        starts = [self.start_s, *(end_s for _, end_s in self.parts)]
        return sum(end_s - start_s for start_s, (part, end_s) in zip(starts, self.parts) if part == name)

    @property
    def now(self) -> str:
        """The part that it is in."""
        return self.during() if self.during else WORKER

    def until(self, name: str, at_s: float | None = None) -> None:
        """Note what the time until `at_s`, or until now, was spent with; nothing if that was noted before."""
        self.during = None
        at_s = time.monotonic() if at_s is None else at_s
        if at_s > self.end_s:
            self.parts.append((name, at_s))

    @property
    def problem(self) -> str:
        """What is wrong with them; empty if nothing is."""
        before_s = self.start_s
        for name, end_s in self.parts:
            if not isinstance(name, str) or not isfinite(end_s) or end_s < before_s:
                return f"({name!r}, {end_s!r}) follows {before_s!r}"
            before_s = end_s
        return "" if isfinite(self.start_s) else f"they begin at {self.start_s!r}"
