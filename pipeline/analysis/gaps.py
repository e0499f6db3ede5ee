"""Finds when workers had no task, and what their next task waited for. Pure; from trace events alone.

    for gap in gaps(plan, Tasks(events), start_s, end_s):
        print(gap.group, gap.worker, gap.end_s - gap.start_s, gap.cause, gap.field)     # learner 0 4.1 field reward

A worker is busy from the start of a task to its end, or, for an unfinished task, until it was lost or until now; but
not while all episodes of a finished task wait for environments, if it has no other task. Its
next task waits for its last prerequisite, which in turn waited for its own; so each idle second is charged to the stage
that ran then and to the column that it made, as on the critical path.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from math import inf

import msgspec

from pipeline.analysis.critical_path import NOBODY, PathSpan, Walker
from pipeline.analysis.episodes import alone, waits_by_task
from pipeline.analysis.waits import ROOM, Reason, Waits, latest, latest_of
from pipeline.declare.times import ENVIRONMENT
from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.record.history import Tasks

CAUSES = {
    "field": "its next task waited for a column that had not been written",
    "weights": "weights had not been trained, or not been published",
    "fence": "its next task must not run at the same time as this stage",
    "worker": "another worker that its next task needs, or its own process, was busy",
    "drain": "a stream had to end before weights were sent",
    "order": "the scheduler held its next task back",
    "environment": "no turn of its episodes was sampled: all of them waited for environments",
    "room": "no groups had been admitted: no room in the data plane, or rollout was as far ahead as allowed",
    "turn": "another group had its GPUs, or it was handing them over or taking them back",
    "checkpoint": "a checkpoint was being written",
    "driver": "its next task, or the report that allows it, was in transit",
    "start": "the run was starting",
    "done": "no work was left",
    "open": "its next task is not in the record yet",
}
Worker = tuple[str, int]  # group and rank
Span = tuple[float, float, int]  # start, end, task


class Gap(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Idle time with one cause of `CAUSES`. Times are monotonic seconds.

    `stage` is the stage that ran meanwhile, and `field` the column or weights that the worker waited for; empty if the
    cause has none. `task` is the number of the next task, or None.
    """

    group: str
    worker: int
    start_s: float
    end_s: float
    cause: str
    stage: str = ""
    field: str = ""
    task: int | None = None


def workers(plan: Plan, tasks: Tasks) -> list[Worker]:
    """Return the workers of a run, by group: the placed ones, or all workers of the plan if none was placed."""
    placed = {(event.group, event.worker) for event in tasks.others if isinstance(event, trace.Placed)}
    every = [(group.name, rank) for group in plan.groups for rank in range(group.workers)]
    return [worker for worker in every if worker in placed] or every


def gaps(
    plan: Plan,
    tasks: Tasks,
    start_s: float,
    end_s: float,
    *,
    waits: Waits | None = None,
    environments: Mapping[int, Sequence[tuple[float, float]]] | None = None,
) -> Iterator[Gap]:
    """Yield the gaps of every worker between two times, in time order; gaps and tasks together cover the interval. Only
    gaps with the cause "environment" are inside tasks; `environments` is the result of `waits_by_task`, if known."""
    finder = _Finder(plan, tasks, waits or Waits(plan, tasks), start_s, end_s)
    finder.environments = waits_by_task(tasks) if environments is None else environments
    for worker in workers(plan, tasks):
        yield from finder.of(worker)


class _Finder:
    """Finds the gaps of workers and splits them by cause."""

    def __init__(self, plan: Plan, tasks: Tasks, waits: Waits, from_s: float, until_s: float) -> None:
        self._tasks, self._waits, self._walker = tasks, waits, Walker(tasks, waits)
        self._stages = {stage.name: stage for stage in plan.stages}
        self._partners = {group.name: plan.partners(group.name) for group in plan.groups}
        self._spans = _busy(plan, tasks, until_s)
        self._free_of = _freed(plan, tasks)
        self._known: dict[int, Reason | None] = {}
        self._from_s, self._until_s = from_s, until_s
        self.environments: Mapping[int, Sequence[tuple[float, float]]] = {}
        self._saved: list[tuple[float, float]] = []
        self._turned: dict[Worker, list[tuple[float, float]]] = defaultdict(list)
        self._started_s, self._finished = 0.0, False
        for event in tasks.others:
            match event:
                case trace.Started():
                    self._started_s = event.monotonic_s
                case trace.Ended():
                    self._finished = True
                case trace.Held():
                    self._saved.append((event.start_s, event.end_s))
                case trace.Turned():
                    self._turned[event.group, event.worker].append((event.start_s, event.end_s))
        begun = [event.at_s for event in tasks.others if isinstance(event, trace.Admitted)]
        self._first_s = min([*begun, *(task.at_s for task in tasks.submitted.values())], default=until_s)

    def of(self, worker: Worker) -> Iterator[Gap]:
        """Yield the gaps of one worker in time order."""
        return merge(self._between(worker), self._within(worker), key=lambda gap: gap.start_s)

    def _within(self, worker: Worker) -> Iterator[Gap]:
        """Yield the gaps inside tasks of episodes."""
        waiting: list[Span] = []
        busy: list[tuple[float, float]] = []
        for start_s, end_s, number in self._spans.get(worker, ()):
            low_s, high_s = max(start_s, self._from_s), min(end_s, self._until_s)
            reached_s = low_s
            for begun_s, ended_s in _inside(self.environments.get(number, ()), low_s, high_s):
                waiting.append((begun_s, ended_s, number))
                busy.append((reached_s, begun_s))
                reached_s = ended_s
            busy.append((reached_s, high_s))
        waiting.sort()
        for start_s, end_s in alone([(a, b) for a, b, _ in waiting], busy):
            number = waiting[bisect_right(waiting, (start_s, inf, 0)) - 1][2]
            yield Gap(
                group=worker[0], worker=worker[1], start_s=start_s, end_s=end_s, cause=ENVIRONMENT,
                stage=self._tasks.submitted[number].stage, task=number,
            )  # fmt: skip

    def _between(self, worker: Worker) -> Iterator[Gap]:
        reached_s = max(self._started_s, self._from_s)
        for start_s, end_s, number in self._spans.get(worker, ()):
            if start_s > reached_s:
                yield from self._divided(worker, reached_s, start_s, number)
            reached_s = max(reached_s, end_s)
            if reached_s >= self._until_s:
                return
        if reached_s < self._until_s:
            yield from self._parted(worker, None, reached_s, self._until_s, "done" if self._finished else "open")

    def _divided(self, worker: Worker, start_s: float, end_s: float, number: int) -> Iterator[Gap]:
        """Yield the gap before a task, split by what the task waited for."""
        task, to_s = self._tasks.submitted[number], min(end_s, self._until_s)
        if start_s < self._first_s:
            yield from self._parted(worker, number, start_s, min(to_s, self._first_s), "start")
            start_s = min(to_s, self._first_s)
        queued = self._waits.queued(task, end_s) if number in self._tasks.ran else None
        found: list[PathSpan] = []
        reason, at_s = queued or self._first(task), to_s
        while reason is not None and at_s > start_s:
            spans, at_s, reason = self._walker.back(reason, start_s, at_s)
            found += spans
            if reason is None or reason.cause != ROOM or not (published := self._waits.published_at(reason.at_s)):
                break
            reason = published  # the groups were admitted because of a new version
        if at_s > start_s:
            cause, stage, field = (reason.cause, reason.stage, reason.field) if reason else ("driver", "", "")
            yield from self._parted(worker, number, start_s, at_s, cause, stage, field)
        for span in reversed(found):
            stage = "" if span.stage == NOBODY else span.stage
            yield from self._parted(worker, number, span.start_s, span.end_s, span.cause, stage, span.field)

    def _first(self, task: trace.Submitted) -> Reason | None:
        """Return the last prerequisite of a task, including work of other workers."""
        if task.task not in self._known:
            at_s = task.at_s + 1e-9
            needs = [need for need in (*self._waits.needs(task), *self._shared(task)) if need.at_s <= at_s]
            last = latest_of(needs)
            self._known[task.task] = self._waits.held(task, last, at_s) or last
        return self._known[task.task]

    def _shared(self, task: trace.Submitted) -> Iterator[Reason]:
        """Yield work of other workers that a task needs, or that held the GPUs of its group."""
        for group in self._stages[task.stage].groups:
            if task.replica is None and (free := latest(self._free_of[group], task.at_s)):
                yield Reason(free[0], "worker", free[1], self._tasks.submitted[free[1]].stage)
            for partner in self._partners[group]:
                if free := latest(self._free_of[partner], task.at_s):
                    yield Reason(free[0], "turn", free[1], self._tasks.submitted[free[1]].stage)

    def _parted(
        self,
        worker: Worker,
        task: int | None,
        start_s: float,
        end_s: float,
        cause: str,
        *named: str,
    ) -> Iterator[Gap]:
        """Yield an interval with one cause (`named`: stage and field), minus the worker's own turns and checkpoints."""
        if start_s >= end_s:
            return
        cuts = [(*span, "turn") for span in _overlapping(self._turned.get(worker, ()), start_s, end_s)]
        if cause == "driver":
            cuts += [(*span, "checkpoint") for span in _overlapping(self._saved, start_s, end_s)]
        for low_s, high_s, other in _cut(start_s, end_s, cuts) if cuts else ((start_s, end_s, ""),):
            stage, field = named if named and not other else ("", "")
            yield Gap(
                group=worker[0], worker=worker[1], start_s=low_s, end_s=high_s, task=task,
                cause=other or cause, stage=stage, field=field,
            )  # fmt: skip


def _inside(spans: Sequence[tuple[float, float]], start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    """Yield what is inside an interval of spans that do not overlap, in time order."""
    for low_s, high_s in spans:
        if max(low_s, start_s) < min(high_s, end_s):
            yield max(low_s, start_s), min(high_s, end_s)


def _overlapping(spans: Sequence[tuple[float, float]], start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    """Yield the spans that overlap an interval, from spans in time order."""
    for place in range(max(0, bisect_right(spans, (start_s, start_s)) - 1), len(spans)):
        if spans[place][0] >= end_s:
            return
        yield spans[place]


def _cut(start_s: float, end_s: float, spans: Sequence[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Split an interval: the part inside each span with its name, the rest without one."""
    for low_s, high_s, name in sorted(spans):
        low_s, high_s = max(low_s, start_s), min(high_s, end_s)
        if low_s < high_s:
            if start_s < low_s:
                yield start_s, low_s, ""
            yield low_s, high_s, name
            start_s = high_s
    if start_s < end_s:
        yield start_s, end_s, ""


def _busy(plan: Plan, tasks: Tasks, until_s: float) -> dict[Worker, list[Span]]:
    """Return each worker's tasks in time order. An unfinished one lasts until it was lost, or until now."""
    lost_s = {event.task: event.at_s for event in tasks.others if isinstance(event, trace.Retried)}
    over_s = next((e.at_s for e in tasks.others if isinstance(e, trace.Failed | trace.Ended)), until_s)
    spans: dict[Worker, list[Span]] = defaultdict(list)
    for number, ran in tasks.ran.items():
        for span in ran if number in tasks.submitted else ():
            spans[span.group, span.worker].append((span.start_s, span.end_s, number))
    groups = {group.name: group for group in plan.groups}
    hosts = {stage.name: stage.groups for stage in plan.stages}
    for number, task in tasks.submitted.items():
        if number not in tasks.ran:
            for name in dict.fromkeys(hosts[task.stage]):
                width = groups[name].model_parallel
                first = (task.replica or 0) * width
                for rank in range(groups[name].workers) if task.replica is None else range(first, first + width):
                    spans[name, rank].append((task.at_s, max(task.at_s, lost_s.get(number, over_s)), number))
    for found in spans.values():
        found.sort()
    return spans


def _freed(plan: Plan, tasks: Tasks) -> dict[str, list[tuple[float, int]]]:
    """Return the end times of each worker group's tasks, in time order."""
    freed: dict[str, list[tuple[float, int]]] = defaultdict(list)
    hosts = {stage.name: stage.groups for stage in plan.stages}
    for number, acknowledged in tasks.acknowledged.items():
        if number in tasks.submitted and number in tasks.ran:
            for name in hosts[tasks.submitted[number].stage]:
                freed[name].append((acknowledged[-1].at_s, number))
    for found in freed.values():
        found.sort()
    return freed
