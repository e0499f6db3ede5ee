"""Who gets how much of a machine's cores, in virtual time. Pure arithmetic; knows no stage and no scheduler.

Work is counted in seconds that it would take alone. Two rules slow it down:

    a lane     one worker process. What it computes for tasks goes first; streams share what is left of it equally.
    a machine  its lanes ask for cores: the mean over what a lane computes now. Where they ask for more cores than
               there are, all of them slow down by the same factor.

Every machine and every lane has a cumulative clock of the service that it has given, so a change costs the logarithm of
the number of lanes and not their number (virtual-time processor sharing; Parekh and Gallager, 1993).

    machine = Machine(cores=2)
    lane = Lane(machine)
    lane.start(0.0, [(0.5, "half"), (1.0, "done")], parallelism=2.0)
    machine.next_s()            # 0.5
    machine.pop(0.5)            # "half"
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import count
from typing import Any


class Job:
    """Work on one lane. `left` counts the marks that it has not passed."""

    __slots__ = ("first", "left", "parallelism")

    def __init__(self, marks: int, parallelism: float, first: bool) -> None:
        self.left, self.parallelism, self.first = marks, parallelism, first


class Machine:
    """`cores` that lanes share; None: there is no contention."""

    def __init__(self, cores: float | None = None) -> None:
        self.cores = cores
        self.demand = 0.0
        self.clock = 0.0  # seconds of service that a lane has had which nothing within it slowed
        self._at_s = 0.0
        self._rate = 1.0
        self._next: list[tuple[float, int, Lane]] = []  # service clock, stamp of the lane's entry
        self._stamps = count(1)

    def next_s(self) -> float:
        """When the next mark is passed; infinity where nothing computes."""
        while self._next and self._next[0][1] != self._next[0][2].stamp:
            heapq.heappop(self._next)
        if not self._next:
            return math.inf
        return self._at_s + max(0.0, self._next[0][0] - self.clock) / self._rate

    def pop(self, now_s: float) -> Any:
        """What was given with the mark that is passed at `now_s`, which is `next_s()`."""
        self.advance(now_s)
        _, _, lane = heapq.heappop(self._next)
        return lane.pass_mark()

    def advance(self, now_s: float) -> float:
        """The service clock at `now_s`."""
        self.clock += self._rate * (now_s - self._at_s)
        self._at_s = now_s
        return self.clock

    def enter(self, lane: Lane, ends: float | None, change: float) -> None:
        """A lane's next mark, by the service clock, and by how much the cores that it asks for have changed."""
        lane.stamp = next(self._stamps)
        if ends is not None:
            heapq.heappush(self._next, (ends, lane.stamp, lane))
        if change:
            self.demand += change
            if self.cores is not None:
                self._rate = self.cores / self.demand if self.demand > self.cores else 1.0


class Lane:
    """One worker process on a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stamp = 0
        self._asked = 0.0
        self._seen = 0.0  # the machine's clock when this lane was last brought up to date
        self._queues = (_Queue(), _Queue())  # tasks, and streams

    def start(self, now_s: float, marks: Sequence[tuple[float, Any]], *, parallelism: float, first: bool = True) -> Job:
        """Begin a piece of work: its marks in ascending seconds of work, the last of which ends it.

        `parallelism` is the cores that it keeps busy; `first` says that it goes before streams.
        """
        self._update(now_s)
        job = Job(len(marks), parallelism, first)
        self._queues[not first].add(job, marks)
        self._reenter()
        return job

    def stop(self, now_s: float, job: Job) -> None:
        """Give a piece of work up. Idempotent."""
        if job.left:
            self._update(now_s)
            job.left = 0
            self._queues[not job.first].remove(job)
            self._reenter()

    def pass_mark(self) -> Any:
        """The next mark is reached; the machine has advanced to it."""
        queue = self._queues[not self._queues[0].jobs]
        self._seen = self.machine.clock
        message = queue.pop()
        self._reenter()
        return message

    def _update(self, now_s: float) -> None:
        clock = self.machine.advance(now_s)
        queue = self._queues[not self._queues[0].jobs]
        if queue.jobs:
            queue.clock += (clock - self._seen) / queue.jobs
        self._seen = clock

    def _reenter(self) -> None:
        queue = self._queues[not self._queues[0].jobs]
        asked = queue.parallelism / queue.jobs if queue.jobs else 0.0
        left = queue.left()
        self.machine.enter(self, None if left is None else self._seen + left * queue.jobs, asked - self._asked)
        self._asked = asked


class _Queue:
    """Jobs that share a lane equally; `clock` is the service that each of them has had."""

    __slots__ = ("_marks", "_order", "clock", "jobs", "parallelism")

    def __init__(self) -> None:
        self.clock = 0.0
        self.jobs = 0
        self.parallelism = 0.0  # the sum over the jobs
        self._marks: list[tuple[float, int, Job, Any]] = []
        self._order = 0

    def add(self, job: Job, marks: Sequence[tuple[float, Any]]) -> None:
        for work_s, message in marks:
            self._order += 1
            heapq.heappush(self._marks, (self.clock + work_s, self._order, job, message))
        self.jobs += 1
        self.parallelism += job.parallelism

    def remove(self, job: Job) -> None:
        self.jobs -= 1
        self.parallelism = self.parallelism - job.parallelism if self.jobs else 0.0

    def left(self) -> float | None:
        """Service until the next mark."""
        while self._marks and not self._marks[0][2].left:
            heapq.heappop(self._marks)
        return max(0.0, self._marks[0][0] - self.clock) if self._marks else None

    def pop(self) -> Any:
        self.clock, _, job, message = heapq.heappop(self._marks)
        job.left -= 1
        if not job.left:
            self.remove(job)
        return message
