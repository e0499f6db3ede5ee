"""Sums how many samples of each stage are not finished, by the part of their time that they are in. Pure.

counts = OpenCounts()
counts.take(task, {"environment": 41, "generate": 23})   # of the worker that runs the task
counts.due(now_s)                                        # [("episode", {...})]: what is to be recorded now

However many workers report, a stage is due at most once every `EVERY_S`, so the record grows with time alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from pipeline.declare.task import Task

EVERY_S = 1.0


class OpenCounts:
    """The last counts of each replica that runs a stage. When nothing is open any more, nothing is due: a reader of
    the record sees the tasks end."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int | None, Mapping[str, int]]] = defaultdict(dict)
        self._given: dict[str, dict[str, int]] = {}  # by stage: what was due last,
        self._given_s: dict[str, float] = {}  # and when
        self._waiting: set[str] = set()  # stages with counts that were not due yet

    def take(self, task: Task, parts: Mapping[str, int]) -> None:
        """Take the counts of all tasks of a stage on the replica that runs this one."""
        stage = task.stage
        self._counts[stage][task.replica] = parts
        if any(self._counts[stage].values()):
            self._waiting.add(stage)
        else:
            self._waiting.discard(stage)
            self._given.pop(stage, None)

    def due(self, now_s: float) -> list[tuple[str, dict[str, int]]]:
        """Return the sums that have changed, by stage."""
        found = []
        for stage in sorted(self._waiting):
            if now_s - self._given_s.get(stage, float("-inf")) < EVERY_S:
                continue
            self._waiting.discard(stage)
            summed = dict(sum(map(Counter, self._counts[stage].values()), Counter[str]()))
            if summed != self._given.get(stage):
                self._given[stage], self._given_s[stage] = summed, now_s
                found.append((stage, summed))
        return found
