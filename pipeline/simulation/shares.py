"""The part of its process that a recorded stream had, over time. Pure; inverts the rules of `simulation.sharing`.

    streams = RecordedStreams(plan, tasks)
    streams.within(task, span.end_s)        # the seconds of work that a stream had done by then, alone on its process
    streams.room                            # {"sampler": 1024}: samples that its streams compute at a time

A process runs one map or transfer at a time, and no stream meanwhile. The streams that run share it equally. An engine
with room for fewer samples than it was given takes the others in their order. The record does not say how much room
there was: the one is taken with which the streams of a stage have the most equal seconds per sample, if they are far
more equal than without a limit.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.record.history import Tasks

MOST_ROOM = 16  # streams, one more than the most room that is tried
FEWEST = 4  # streams that tell how much room there was,
ROOM_PAYS = 0.5  # if it leaves less than this fraction of the squared error
Span = tuple[float, float]  # start and end, in seconds


class ProcessShares:
    """The share of a process that each of its streams has: nothing inside the spans `blocked`, else one over the number
    of `streams` that run, 1 where none does."""

    def __init__(self, blocked: Iterable[Span] = (), streams: Iterable[Span] = ()) -> None:
        changes: dict[float, Counter[str]] = defaultdict(Counter)
        for kind, spans in (("blocked", blocked), ("streams", streams)):
            for start_s, end_s in spans:
                changes[start_s][kind] += 1
                changes[end_s][kind] -= 1
        self._times = sorted(changes)  # at which the share changes
        self._rates = [1.0]  # before the first change, and after each
        running: Counter[str] = Counter()
        for at_s in self._times:
            running.update(changes[at_s])
            self._rates.append(0.0 if running["blocked"] else 1.0 / max(1, running["streams"]))
        self._given = [0.0]  # seconds given from the first change to each
        for (begun_s, ended_s), rate in zip(pairwise(self._times), self._rates[1:]):
            self._given.append(self._given[-1] + rate * (ended_s - begun_s))

    def within(self, start_s: float, end_s: float) -> float:
        """Return the seconds that a stream is given between two times."""
        return max(0.0, self._until(end_s) - self._until(start_s))

    def behind(self, start_s: float, seconds: float) -> float:
        """Return the first time at which a stream has been given `seconds` since `start_s`."""
        at_s = start_s
        for place in range(bisect_right(self._times, start_s), len(self._times)):
            given_s = self._rates[place] * (self._times[place] - at_s)
            if given_s >= seconds:
                break
            seconds -= given_s
            at_s = self._times[place]
        rate = self._rates[bisect_right(self._times, at_s)]
        return at_s + seconds / rate if rate else at_s

    def _until(self, at_s: float) -> float:
        """Return the seconds given up to a time, counted from the first change."""
        if not self._times:
            return at_s
        place = bisect_right(self._times, at_s)
        if not place:
            return at_s - self._times[0]
        return self._given[place - 1] + self._rates[place] * (at_s - self._times[place - 1])


class RecordedStream(NamedTuple):
    """A recorded stream and the time in which it may have computed, infinite if it had no end in the record."""

    task: int
    stage: str
    group: str
    samples: int
    start_s: float
    end_s: float


class RecordedStreams:
    """The streams of a record, and the work that each had done at a time. `room` has the samples that a worker computes
    at a time, by group, where streams waited for room."""

    def __init__(self, plan: Plan, tasks: Tasks) -> None:
        self.room: dict[str, int] = {}
        self._blocked = _blocked(plan, tasks)
        self._by_process = _streams(plan, tasks)
        streams = [stage.name for stage in plan.stages if stage.shape == "stream"]
        self._counted = {task.task for name in streams for task in tasks.of(name)}  # without those of the first step
        self._make()
        for group in plan.groups:
            if group.gpus and (room := self._room_of(group.name)):
                self.room[group.name] = room
        self._make()

    def within(self, task: int, end_s: float) -> float:
        """Return the seconds of work that a stream has done at a time, alone on its process."""
        shares, start_s = self._of[task]
        return shares.within(start_s, end_s)

    def behind(self, task: int, seconds: float) -> float:
        """Return the time at which a stream has done that many seconds of work."""
        shares, start_s = self._of[task]
        return shares.behind(start_s, seconds)

    def _make(self) -> None:
        """Find when each stream began to compute, and its shares from then on."""
        self._of: dict[int, tuple[ProcessShares, float]] = {}
        for process, streams in self._by_process.items():
            began_s = entered(streams, self.room)
            shares = ProcessShares(
                self._blocked.get(process, ()), ((at_s, stream.end_s) for stream, at_s in zip(streams, began_s))
            )
            self._of.update({stream.task: (shares, at_s) for stream, at_s in zip(streams, began_s)})

    def _room_of(self, group: str) -> int | None:
        """Return the room of a group's workers; None if no stream waited, as far as the record shows."""
        streams = [each for found in self._by_process.values() for each in found if each.group == group]
        most = max((each.samples for each in streams), default=0)
        counted = [each for each in streams if each.task in self._counted]
        if not most or len(counted) < FEWEST:
            return None
        errors = {}
        for rooms in range(1, min(MOST_ROOM, max(map(_deepest, self._by_process.values())))):
            self.room[group] = rooms * most
            self._make()
            errors[rooms * most] = self._error(counted)
        self.room.pop(group, None)
        self._make()
        best = min(errors, key=errors.__getitem__, default=0)
        return best if best and errors[best] < ROOM_PAYS * self._error(counted) else None

    def _error(self, streams: Sequence[RecordedStream]) -> float:
        """Return how unequal the seconds per sample are: squared errors relative to the means of the stages."""
        each_s: dict[str, list[float]] = defaultdict(list)
        for stream in streams:
            each_s[stream.stage].append(self.within(stream.task, stream.end_s) / max(1, stream.samples))
        means = {stage: fmean(found) for stage, found in each_s.items()}
        return sum((one / means[stage] - 1) ** 2 for stage, found in each_s.items() for one in found if means[stage])


def entered(streams: Sequence[RecordedStream], room: Mapping[str, int]) -> list[float]:
    """Return when each of a process's streams, in the order of their starts, has room for its samples."""
    running: list[tuple[float, int]] = []  # ends and samples
    used, before_s, found = 0, -math.inf, []
    for stream in streams:
        at_s = max(stream.start_s, before_s)
        while running and (running[0][0] <= at_s or used + stream.samples > room.get(stream.group, math.inf)):
            end_s, samples = heapq.heappop(running)
            used, at_s = used - samples, max(at_s, end_s)
        before_s = min(at_s, stream.end_s)
        found.append(before_s)
        heapq.heappush(running, (stream.end_s, stream.samples))
        used += stream.samples
    return found


def free_seconds(plan: Plan, tasks: Tasks) -> Mapping[int, ProcessShares]:
    """Return, by process, the seconds in which it ran no task that blocks it."""
    made = {process: ProcessShares(spans) for process, spans in _blocked(plan, tasks).items()}
    return defaultdict(ProcessShares, made)


def first_end_s(tasks: Tasks, task: int, default_s: float) -> float:
    """Return when a stream put its first groups; `default_s` if it put none."""
    return min((put.end_s for put in tasks.puts[task]), default=default_s)


def _deepest(streams: Sequence[RecordedStream]) -> int:
    """Return how many streams of a process ran at the same time at most."""
    changes = sorted([(each.start_s, 1) for each in streams] + [(each.end_s, -1) for each in streams])
    depth = deepest = 0
    for _, change in changes:
        depth += change
        deepest = max(deepest, depth)
    return deepest


def _blocked(plan: Plan, tasks: Tasks) -> Mapping[int, list[Span]]:
    """Return, by process, the spans of tasks that block all other tasks of the process."""
    streams = {stage.name for stage in plan.stages if stage.shape == "stream"}
    spans: dict[int, list[Span]] = defaultdict(list)
    for ran in tasks.ran.values():
        for span in ran:
            if span.stage not in streams:
                spans[tasks.process.get((span.group, span.worker), 0)].append((span.start_s, span.end_s))
    return spans


def _streams(plan: Plan, tasks: Tasks) -> Mapping[int, list[RecordedStream]]:
    """Return the streams of each process in the order of their starts. On GPUs they compute to their end. Elsewhere
    they compute to their first groups, and may only wait after those."""
    groups = {group.name: group for group in plan.groups}
    stages = {stage.name for stage in plan.stages if stage.shape == "stream"}
    lost_s = {event.task: event.at_s for event in tasks.others if isinstance(event, trace.Retried)}
    found: dict[int, list[RecordedStream]] = defaultdict(list)

    def add(process: int, number: int, stage: str, name: str, samples: int, start_s: float, end_s: float) -> None:
        if not groups[name].gpus:
            end_s = first_end_s(tasks, number, end_s)
        found[process].append(RecordedStream(number, stage, name, samples, start_s, max(start_s, end_s)))

    for number, ran in tasks.ran.items():
        span = ran[0]
        if span.stage in stages:
            samples, process = len(span.groups) * plan.group_size, tasks.process.get((span.group, span.worker), 0)
            add(process, number, span.stage, span.group, samples, span.start_s, span.end_s)
    for number, task in tasks.submitted.items():
        if task.stage in stages and number not in tasks.ran:  # still runs where the record ends, or its worker was lost
            rank = (task.replica or 0) * groups[task.group].model_parallel
            process, end_s = tasks.process.get((task.group, rank), 0), lost_s.get(number, math.inf)
            add(process, number, task.stage, task.group, task.samples, task.at_s, end_s)
    return {process: sorted(streams, key=lambda each: (each.start_s, each.task)) for process, streams in found.items()}
