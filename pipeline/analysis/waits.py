"""Finds what each task waited for: all prerequisites of its submission, and when each was ready. Pure; for critical
path, slack and idle time.

    waits = Waits(plan, Tasks(events))
    # the last prerequisite: Reason(cause="field", field="reward", stage="reward", ...)
    waits.last(task, task.at_s)

Causes:

    field     a column that it reads
    weights   weights that it reads, or the version that it samples with
    fence     a stage that it must not overlap with
    worker    earlier work of its worker, or of the process that the worker shares
    drain     a stream that had to finish before the weights were swapped
    room      its groups were not admitted yet
    order     the scheduler held it back until another task was done
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record import trace
from pipeline.record.history import Tasks

AT_ONCE_S = 0.005  # a task submitted this soon after a prerequisite waited only for that prerequisite
ROOM = "room"
Done = tuple[float, int]  # the time when it was ready, and the task that made it


class Reason(NamedTuple):
    """A prerequisite of a task.

    `at_s` is when it was ready, `task` the task that made it, `stage` that task's stage or the external one; `field`
    is set for columns and weights.
    """

    at_s: float
    cause: str
    task: int | None
    stage: str = ""
    field: str = ""


class Waits:
    """Finds what the tasks of a record waited for."""

    def __init__(self, plan: Plan, tasks: Tasks) -> None:
        self._plan, self._tasks = plan, tasks
        self._stages = {stage.name: stage for stage in plan.stages}
        self._writer = {field: stage.name for stage in plan.stages for field in stage.writes}
        self._weights = set(plan.weights_fields)
        self._fences: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for fence in plan.fences:
            self._fences[fence.after].append((fence.before, fence.lag))
        self._done: dict[str, dict[int, Done]] = {stage.name: {} for stage in plan.stages}  # by stage and group
        self._made_by = {stage.name: self._writers(stage) for stage in plan.stages}
        self._step_done: dict[tuple[str, int], Done] = {}  # (stage, step): the same for the whole step
        self._freed: dict[tuple[str, int | None], list[Done]] = defaultdict(list)
        self._drained: dict[str, list[Done]] = defaultdict(list)
        self._acknowledged: list[Done] = []
        self._ended_in: dict[int, list[Done]] = defaultdict(list)  # task ends by process
        self._published: list[Done] = []
        self._reached: dict[tuple[str, int | None], list[Done]] = defaultdict(list)  # earlier, by group and replica
        self._admitted: dict[int, float] = {}
        self._outside: dict[str, dict[int, float]] = defaultdict(dict)  # by stage and group: arrival time
        self._index()

    def _index(self) -> None:
        """Index when each possible prerequisite was ready."""
        for number, ran in self._tasks.ran.items():
            for span in ran if number in self._tasks.submitted else ():
                self._ended_in[self._tasks.process.get((span.group, span.worker), 0)].append((span.end_s, number))
        for number, acknowledged in self._tasks.acknowledged.items():
            task = self._tasks.submitted.get(number)
            if task is not None:
                self._index_task(task, acknowledged)
        for events in (
            *self._ended_in.values(),
            *self._freed.values(),
            *self._drained.values(),
            self._acknowledged,
            self._published,
        ):
            events.sort()
        for other in self._tasks.others:
            if isinstance(other, trace.Admitted):
                self._admitted.update(dict.fromkeys(other.groups, other.at_s))
            elif isinstance(other, trace.Served):
                self._reached[self._stages[other.stage].groups[-1], other.replica].append((other.at_s, other.task))
            elif isinstance(other, trace.Put):
                self._outside[other.stage].update(dict.fromkeys(other.groups, other.end_s))

    def _index_task(self, task: trace.Submitted, acknowledged: Sequence[trace.Acknowledged]) -> None:
        number = task.task
        for event in acknowledged:
            self._acknowledged.append((event.at_s, number))
            self._done[event.stage].update(dict.fromkeys(event.groups, (event.at_s, number)))
        last_s = acknowledged[-1].at_s
        key = (task.stage, task.step)
        self._step_done[key] = max(self._step_done.get(key, (0.0, 0)), (last_s, number))
        stage = self._stages[task.stage]
        if stage.shape == "stream":
            self._drained[stage.groups[0]].append((last_s, number))
        else:
            for name in stage.groups:
                self._freed[name, task.replica].append((last_s, number))
        if stage.shape == "transfer":
            self._published.append((last_s, number))

    def _writers(self, stage: PlannedStage) -> list[tuple[str, str]]:
        """Return the stages that write a stage's inputs, each with its first such column, and all weights."""
        found: dict[str, str] = {}
        weights = [(self._writer[field], field) for field in stage.reads if field in self._weights]
        for field in (*stage.reads, *stage.awaits):
            if field not in self._weights:
                found.setdefault(self._writer[field], field)
        return [*found.items(), *weights]

    def ended(self, step: int) -> int | None:
        """Return the task that ends a step: the refit, or without a refit the last task to be acknowledged."""
        there = [
            done
            for stage in self._plan.stages
            if (stage.shape == "transfer" or not self._published) and (done := self._step_done.get((stage.name, step)))
        ]
        return next((number for _, number in sorted(there, reverse=True) if number in self._tasks.ran), None)

    def last(self, task: trace.Submitted, before_s: float) -> Reason | None:
        """Return the last prerequisite of a task that was ready by its submission and by `before_s`."""
        at_s = min(task.at_s, before_s) + 1e-9
        reasons = [reason for reason in self.needs(task) if reason.at_s <= at_s]
        last = latest_of(reasons)
        return self.held(task, last, at_s) or last

    def held(self, task: trace.Submitted, last: Reason | None, at_s: float) -> Reason | None:
        """Return the task whose end released this one, if the scheduler held it back after its last prerequisite
        (`last`) was ready."""
        if last is None or task.at_s - last.at_s > AT_ONCE_S:
            held = self._made(latest(self._acknowledged, at_s), "order")
            if held and (last is None or held[0].at_s > last.at_s + AT_ONCE_S):
                return held[0]
        return None

    def queued(self, task: trace.Submitted, begun_s: float) -> Reason | None:
        """Return the work that occupied a task's process between its submission and its start, if that took long."""
        if begun_s - task.at_s <= AT_ONCE_S:
            return None
        found = self.before_in_process(task, begun_s)
        return found if found and found.at_s > task.at_s else None

    def before_in_process(self, task: trace.Submitted, begun_s: float) -> Reason | None:
        """Return the last task to end in a task's process before it started."""
        span = self._tasks.ran[task.task][0]
        found = latest(self._ended_in[self._tasks.process.get((span.group, span.worker), 0)], begun_s)
        if found is None or found[1] == task.task:
            return None
        return Reason(found[0], "worker", found[1], self._tasks.submitted[found[1]].stage)

    def needs(self, task: trace.Submitted) -> list[Reason]:
        """Return all prerequisites of a task; for a column, the last group to arrive."""
        stage = self._stages[task.stage]
        reasons: list[Reason] = []
        for writer, field in self._made_by[stage.name]:
            if field in self._weights:
                reasons += self._made(self._step_done.get((writer, task.step)), "weights", field)
                continue
            done, outside = self._done[writer], self._outside.get(writer)
            there = [done[group] for group in task.groups if group in done]
            reasons += self._made(max(there, default=None), "field", field)
            came = [outside[group] for group in task.groups if group in outside] if outside else ()
            reasons += [Reason(max(came), "field", None, writer, field)] if came else []
        for field in stage.reads_back:
            reached = self._reached[stage.groups[0], task.replica]
            newest = max(filter(None, (latest(self._published, task.at_s), latest(reached, task.at_s))), default=None)
            reasons += self._made(newest, "weights", field)
        for before, lag in self._fences[stage.name]:
            reasons += self._made(self._step_done.get((before, task.step - lag)), "fence")
        if stage.shape != "stream":
            for group in stage.groups:
                for replica in {task.replica, None}:
                    reasons += self._made(latest(self._freed[group, replica], task.at_s), "worker")
        if stage.shape == "transfer" and self._plan.refit == "drain":
            reasons += self._made(latest(self._drained[stage.groups[-1]], task.at_s), "drain")
        admitted = [self._admitted[group] for group in task.groups if group in self._admitted]
        return reasons + ([Reason(max(admitted), ROOM, None)] if admitted else [])

    def parts(self, task: trace.Submitted) -> Iterator[Reason]:
        """Yield the tasks that wrote a task's inputs, each once, with the time of its last input."""
        for writer, field in self._made_by[task.stage]:
            if field not in self._weights:
                done = self._done[writer]
                last: dict[int, float] = {}
                for group in task.groups:
                    if group in done:
                        at_s, number = done[group]
                        last[number] = max(last.get(number, 0.0), at_s)
                for number, at_s in last.items():
                    yield Reason(at_s, "field", number, writer, field)

    def published_at(self, at_s: float) -> Reason | None:
        """Return the publication at `at_s`, or just before; None if there is none."""
        found = self._made(latest(self._published, at_s), "weights")
        if not found or at_s - found[0].at_s > AT_ONCE_S:
            return None
        return found[0]._replace(field=self._stages[found[0].stage].writes[0])

    def worked_until(self, number: int, at_s: float) -> float:
        """Return when a task had finished the groups acknowledged at `at_s`: a stream puts some before others."""
        ended_s = min(at_s, max(span.end_s for span in self._tasks.ran[number]))
        if self._stages[self._tasks.submitted[number].stage].shape == "stream":
            return max((put.end_s for put in self._tasks.puts[number] if put.end_s <= at_s), default=ended_s)
        return ended_s

    def _made(self, there: Done | None, cause: str, field: str = "") -> list[Reason]:
        if there is None or there[1] not in self._tasks.ran:
            return []
        return [Reason(there[0], cause, there[1], self._tasks.submitted[there[1]].stage, field)]


def latest_of(reasons: Sequence[Reason]) -> Reason | None:
    """Return the latest reason; in a tie, one other than `worker`."""
    return max(reasons, key=lambda reason: (reason.at_s, reason.cause != "worker"), default=None)


def latest(events: Sequence[Done], at_s: float) -> Done | None:
    """Return the last event at or before `at_s`, from events in time order."""
    place = bisect_right(events, (at_s + 1e-9, 1 << 62))
    return events[place - 1] if place else None
