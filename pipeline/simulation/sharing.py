"""Shares a machine's cores among its workers, in virtual time. Pure arithmetic; knows no stage and no scheduler.

Work is measured in the seconds that it would take alone. Two rules slow it down:

    a lane     one worker process. Maps and transfers run first; streams run only if there are none. The jobs that run
               share the lane equally. A lane with `room` for that many samples takes further streams in their order.
    a machine  each lane requests cores: the mean parallelism of the jobs that it runs. If the lanes request more cores
               than there are, all of them slow down by the same factor.

Every machine and every lane has a cumulative clock of the service that it has given, so a change takes time logarithmic
in the number of lanes, not linear (virtual-time processor sharing; Parekh and Gallager, 1993).

    machine = Machine(cores=2)
    lane = Lane(machine)
    lane.start(0.0, [(0.5, "half"), (1.0, "done")], parallelism=2.0)
    machine.next_s()            # 0.5
    machine.pop(0.5)            # "half"
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any


class Job:
    """Work on one lane. `left` counts the marks that it has not reached; `began` is its queue's clock at its start,
    infinity while it waits for room; `samples` is the room that it takes."""

    __slots__ = ("began", "first", "left", "parallelism", "samples")

    def __init__(self, marks: int, parallelism: float, first: bool, samples: int) -> None:
        self.left, self.parallelism, self.first, self.samples = marks, parallelism, first, samples
        self.began = math.inf


class Machine:
    """A machine whose lanes share its `cores`; None means no contention."""

    def __init__(self, cores: float | None = None) -> None:
        self.cores = cores
        self.demand = 0.0
        self.clock = 0.0  # seconds of service received so far by a lane that runs a single job
        self._at_s = 0.0
        self._rate = 1.0
        self._next: list[tuple[float, int, Lane]] = []  # service clock, stamp of the lane's entry
        self._stamps = count(1)

    def next_s(self) -> float:
        """Return the time of the next mark; infinity if nothing computes."""
        while self._next and self._next[0][1] != self._next[0][2].stamp:
            heapq.heappop(self._next)
        if not self._next:
            return math.inf
        return self._at_s + max(0.0, self._next[0][0] - self.clock) / self._rate

    def pop(self, now_s: float) -> Any:
        """Pass the next mark, at `now_s` = `next_s()`, and return its message."""
        self.advance(now_s)
        _, _, lane = heapq.heappop(self._next)
        return lane.pass_mark()

    def advance(self, now_s: float) -> float:
        """Advance the service clock to `now_s` and return it."""
        self.clock += self._rate * (now_s - self._at_s)
        self._at_s = now_s
        return self.clock

    def enter(self, lane: Lane, ends: float | None, change: float) -> None:
        """Record when a lane's next mark ends, on the service clock, and the change in the cores that it requests."""
        lane.stamp = next(self._stamps)
        if ends is not None:
            heapq.heappush(self._next, (ends, lane.stamp, lane))
        if change:
            self.demand += change
            if self.cores is not None:
                self._rate = self.cores / self.demand if self.demand > self.cores else 1.0


class Lane:
    """One worker process on a machine. Its streams have `room` for that many samples at a time."""

    def __init__(self, machine: Machine, room: float = math.inf) -> None:
        self.machine = machine
        self.stamp = 0
        self._asked = 0.0
        self._seen = 0.0  # the machine's clock at the last update of this lane
        self._queues = (_Queue(), _Queue(room))  # maps and transfers; streams

    def start(
        self,
        now_s: float,
        marks: Sequence[tuple[float, Any]],
        *,
        parallelism: float,
        first: bool = True,
        samples: int = 0,
    ) -> Job:
        """Start a job. Its marks are in ascending seconds of work; the last one ends it.

        `parallelism` is the number of cores that it keeps busy. With `first`, it runs before streams. A stream of more
        `samples` than there is room for waits for those before it.
        """
        self._update(now_s)
        job = Job(len(marks), parallelism, first, samples)
        self._queues[not first].add(job, marks)
        self._reenter()
        return job

    def stop(self, now_s: float, job: Job) -> None:
        """Cancel a job. Idempotent."""
        if job.left:
            self._update(now_s)
            job.left = 0
            self._queues[not job.first].remove(job)
            self._reenter()

    def done_s(self, now_s: float, job: Job) -> float:
        """Return the seconds of work that a job has received."""
        self._update(now_s)
        return max(0.0, self._queues[not job.first].clock - job.began)

    def pass_mark(self) -> Any:
        """Pass the next mark and return its message; the machine has already advanced to it."""
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
    """Jobs that share a lane equally; `clock` is the service that each of them has received. Those without room wait
    for it in their order; a job that is alone always has room."""

    __slots__ = ("_marks", "_order", "_room", "_samples", "_waiting", "clock", "jobs", "parallelism")

    def __init__(self, room: float = math.inf) -> None:
        self.clock = 0.0
        self.jobs = 0
        self.parallelism = 0.0  # the sum over the jobs
        self._room, self._samples = room, 0
        self._waiting: deque[tuple[Job, Sequence[tuple[float, Any]]]] = deque()
        self._marks: list[tuple[float, int, Job, Any]] = []
        self._order = 0

    def add(self, job: Job, marks: Sequence[tuple[float, Any]]) -> None:
        self._waiting.append((job, marks))
        self._enter()

    def _enter(self) -> None:
        """Start the jobs that have room."""
        while self._waiting and (not self.jobs or self._samples + self._waiting[0][0].samples <= self._room):
            job, marks = self._waiting.popleft()
            job.began = self.clock
            for work_s, message in marks:
                self._order += 1
                heapq.heappush(self._marks, (self.clock + work_s, self._order, job, message))
            self.jobs += 1
            self._samples += job.samples
            self.parallelism += job.parallelism

    def remove(self, job: Job) -> None:
        if job.began == math.inf:
            self._waiting = deque(each for each in self._waiting if each[0] is not job)
        else:
            self.jobs -= 1
            self._samples -= job.samples
            self.parallelism = self.parallelism - job.parallelism if self.jobs else 0.0
        self._enter()

    def left(self) -> float | None:
        """Return the service until the next mark; None if there is no mark."""
        while self._marks and not self._marks[0][2].left:
            heapq.heappop(self._marks)
        return max(0.0, self._marks[0][0] - self.clock) if self._marks else None

    def pop(self) -> Any:
        self.clock, _, job, message = heapq.heappop(self._marks)
        job.left -= 1
        if not job.left:
            self.remove(job)
        return message
