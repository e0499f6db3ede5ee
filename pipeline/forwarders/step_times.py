"""Says when each step of a run ended, by the wall clock, from the record of the run, which may still grow.

    times = StepTimes(run_dir.events)
    for at_s, line in times.of(lines, last=False): sink.put(line["step"], at_s, ...)

A record has monotonic times; each of its starts says what the wall clock was.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pipeline.record import trace
from pipeline.record.runs import Metrics

KINDS: frozenset[type] = frozenset({trace.Started, trace.StepEnded})
LARGEST_S = 1e11  # a time of a damaged record may be any number


class StepTimes:
    """The ends of steps, numbered as in metrics.jsonl: 0 is before training."""

    def __init__(self, events: Path) -> None:
        self._events, self._offset = events, 0
        self._started_s: float | None = None  # when the run first started
        self._shift_s = 0.0  # to add to monotonic times of the current start
        self._ends_s: dict[int, float] = {}
        self._waiting: list[Metrics] = []

    def of(self, lines: Iterable[Metrics], *, last: bool) -> Iterator[tuple[float, Metrics]]:
        """Yield lines of metrics.jsonl in order, each with the time at which its step ended.

        A live run writes the line first: one whose step has not ended in the record waits for the next call, or, with
        `last`, gets the latest time before it.
        """
        self._read()
        overdue, self._waiting = self._waiting, []
        for line in overdue:
            yield self._latest_s(line["step"]), line
        for line in lines:
            if last or (not self._waiting and self._end_s(line["step"]) is not None):
                yield self._latest_s(line["step"]), line
            else:
                self._waiting.append(line)

    def _latest_s(self, step: int) -> float:
        """Return when a step ended; if the record lacks that, when the last step before it did, or the run started;
        without a record, the time of now."""
        if (end_s := self._end_s(step)) is not None:
            return end_s
        known_s = max((end_s for number, end_s in self._ends_s.items() if number < step), default=self._started_s)
        return time.time() if known_s is None else known_s

    def _end_s(self, step: int) -> float | None:
        if step not in self._ends_s:
            self._read()
        return self._ends_s.get(step)

    def _read(self) -> None:
        """Take what the record has gained. What cannot be read is passed over."""
        try:
            size = self._events.stat().st_size
            if size < self._offset:  # the run started again from step 0
                self._offset, self._ends_s = 0, {}
            while (part := trace.skim(self._events, self._offset, size, KINDS)).offset > self._offset:
                self._offset = part.offset
                for _, event in part.events:
                    self._take(event)
        except msgspec.DecodeError:
            self._offset = trace.whole_lines(self._events)
        except OSError:
            return

    def _take(self, event: trace.TraceEvent) -> None:
        if isinstance(event, trace.Started):
            self._shift_s = event.wall_s - event.monotonic_s
            if self._started_s is None:
                self._started_s = min(max(0.0, event.wall_s), LARGEST_S)
            self._ends_s = {step: end_s for step, end_s in self._ends_s.items() if step <= event.start}
        elif isinstance(event, trace.StepEnded) and self._started_s is not None:
            self._ends_s[event.step + 1] = min(max(0.0, event.at_s + self._shift_s), LARGEST_S)
