"""What a run waited for, walked backwards from each published version. Pure; from trace events alone.

A task starts when the last of several things is there. That one is on the path, and the time since it began is its own;
from its start the walk goes on, until the version before. So the seconds of a step are divided without rest among

    (stage, cause)    a stage that worked, and why it was waited for:
                      field     it made a column that the next one reads
                      weights   it made the weights that the next one reads, or the version that it samples with
                      fence     the next one must not run beside it
                      worker    the next one's worker had it to do first
                      drain     it was a stream that had to end before the weights were swapped
                      order     the scheduler held the next one back until it was done
    ("no stage", "driver")    nothing that is needed ran: reports and tasks were on their way, or the driver was busy
    ("no stage", "room")      groups had not been admitted yet
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from pipeline import trace
from pipeline.history import Tasks
from pipeline.plan import Plan, PlannedStage

DRIVER, ROOM = "driver", "room"
NOBODY = "no stage"
AT_ONCE_S = 0.005  # a task that is handed out so soon after something was there waited for that, and for nothing else


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a step on the path, in the mean.

    `by_stage` has "no stage" for what is of none; `by_cause` says why a stage was waited for; `steps` has
    `by_stage` of every step; `sentence` says it in words.
    """

    by_stage: dict[str, float]
    by_cause: dict[str, float]
    steps: tuple[dict[str, float], ...]
    sentence: str


class _Reason(NamedTuple):
    """Something without which a task could not have been handed out, and when it was there."""

    at_s: float
    cause: str
    task: int | None  # what made it


def critical_path(plan: Plan, tasks: Tasks, ends: Sequence[tuple[float, int]]) -> CriticalPath:
    """The path of every step. `ends` are the times at which steps ended and their numbers, the first of which is not
    looked at: there the second begins."""
    walker = _Walker(plan, tasks)
    steps = [walker.walk(start_s, end_s, step) for (start_s, _), (end_s, step) in pairwise(ends)]
    ends_s = [end_s for end_s, _ in ends]
    by_stage = _summed((stage, spent_s / len(steps)) for step in steps for (stage, _), spent_s in step.items())
    return CriticalPath(
        by_stage=by_stage,
        by_cause=_summed((cause, spent_s / len(steps)) for step in steps for (_, cause), spent_s in step.items()),
        steps=tuple(_summed((stage, spent_s) for (stage, _), spent_s in step.items()) for step in steps),
        sentence=_sentence(plan, tasks, by_stage, ends_s),
    )


def _summed(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of each name, the largest first."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in parts:
        sums[name] += value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _sentence(plan: Plan, tasks: Tasks, by_stage: dict[str, float], ends_s: Sequence[float]) -> str:
    """What bounds a step, and how long the stage that it bounds waited."""
    total_s = sum(by_stage.values())
    if not total_s:
        return "no step has ended"
    first = next(iter(by_stage))
    what = "bound by the driver" if first == NOBODY else f"{first}-bound"
    text = f"{what}: {100 * by_stage[first] / total_s:.0f} % of the step"
    trainers = [stage for stage in plan.stages if stage.updates]
    samplers = [stage for stage in plan.stages if stage.reads_back]
    waiting = samplers if first in {stage.name for stage in trainers} else trainers
    for stage in waiting[:1]:
        text += f"; {stage.name} waited {_idle(tasks, stage, ends_s[0], ends_s[-1]) / (len(ends_s) - 1):.2f} s a step"
    return text


def _idle(tasks: Tasks, stage: PlannedStage, start_s: float, end_s: float) -> float:
    """Seconds in which no task of a stage was running."""
    idle_s, reached_s = 0.0, start_s
    spans = sorted((s.start_s, s.end_s) for ran in tasks.ran.values() for s in ran if s.stage == stage.name)
    for begun_s, ended_s in spans:
        if begun_s > reached_s:
            idle_s += min(begun_s, end_s) - reached_s
        reached_s = max(reached_s, min(ended_s, end_s))
        if reached_s >= end_s:
            return idle_s
    return idle_s + max(0.0, end_s - reached_s)


class _Walker:
    """Finds what a task waited for last."""

    def __init__(self, plan: Plan, tasks: Tasks) -> None:
        self._plan, self._tasks = plan, tasks
        self._stages = {stage.name: stage for stage in plan.stages}
        self._writer = {field: stage.name for stage in plan.stages for field in stage.writes}
        self._weights = set(plan.weights_fields)
        self._fences: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for fence in plan.fences:
            self._fences[fence.after].append((fence.before, fence.lag))
        self._done: dict[tuple[str, int], tuple[float, int]] = {}  # (stage, group): when it was there, by which task
        self._step_done: dict[tuple[str, int], tuple[float, int]] = {}  # (stage, step): the same of all of it
        self._freed: dict[tuple[str, int | None], list[tuple[float, int]]] = defaultdict(list)
        self._drained: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._acknowledged: list[tuple[float, int]] = []
        self._ended_in: dict[int, list[tuple[float, int]]] = defaultdict(list)  # what ended when in a process
        self._published: list[tuple[float, int]] = []
        self._admitted: dict[int, float] = {}
        self._outside: dict[tuple[str, int], float] = {}
        self._index()

    def _index(self) -> None:
        """What was there when, by what a task may wait for."""
        publishes = {stage.name for stage in self._plan.stages if stage.shape == "transfer"}
        for number, ran in self._tasks.ran.items():
            for span in ran if number in self._tasks.submitted else ():
                self._ended_in[self._tasks.process.get((span.group, span.worker), 0)].append((span.end_s, number))
        for number, acknowledged in self._tasks.acknowledged.items():
            task = self._tasks.submitted.get(number)
            if task is None:
                continue
            for event in acknowledged:
                self._acknowledged.append((event.at_s, number))
                for group in event.groups:
                    self._done[event.stage, group] = (event.at_s, number)
            last_s = acknowledged[-1].at_s
            key = (task.stage, task.step)
            self._step_done[key] = max(self._step_done.get(key, (0.0, 0)), (last_s, number))
            stage = self._stages[task.stage]
            if stage.shape == "stream":
                self._drained[stage.groups[0]].append((last_s, number))
            else:
                for name in stage.groups:
                    self._freed[name, task.replica].append((last_s, number))
            if stage.name in publishes:
                self._published.append((last_s, number))
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
            elif isinstance(other, trace.Put):
                self._outside.update({(other.stage, group): other.end_s for group in other.groups})

    def walk(self, start_s: float, end_s: float, step: int) -> dict[tuple[str, str], float]:
        """Seconds by (stage, cause) between two times, the later of which is the end of a step."""
        spent: dict[tuple[str, str], float] = defaultdict(float)
        found = self._ended(step)
        cause, at_s = "field", end_s
        while found is not None and at_s > start_s:
            task = self._tasks.submitted[found]
            begun_s = max(start_s, min(at_s, min(span.start_s for span in self._tasks.ran[found])))
            worked_s = min(at_s, max(begun_s, self._worked_until(found, at_s)))
            spent[NOBODY, DRIVER] += at_s - worked_s
            spent[task.stage, cause] += worked_s - begun_s
            at_s = begun_s
            reason = self._queued(task, at_s) or self._reason(task, at_s)
            if reason is None:
                break
            there_s = max(start_s, min(at_s, reason.at_s))
            spent[NOBODY, DRIVER] += at_s - there_s
            at_s, cause, found = there_s, reason.cause, reason.task
            if found is None and cause == ROOM:
                break
        if at_s > start_s:
            spent[NOBODY, ROOM if cause == ROOM else DRIVER] += at_s - start_s
        return {key: value for key, value in spent.items() if value > 0}

    def _ended(self, step: int) -> int | None:
        """The task whose end is the end of a step: the refit, or without one the last to be acknowledged."""
        there = [
            done
            for stage in self._plan.stages
            if (stage.shape == "transfer" or not self._published) and (done := self._step_done.get((stage.name, step)))
        ]
        return next((number for _, number in sorted(there, reverse=True) if number in self._tasks.ran), None)

    def _worked_until(self, number: int, at_s: float) -> float:
        """When a task had done what was acknowledged at `at_s`: a stream puts some groups before others."""
        task = self._tasks.submitted[number]
        if self._stages[task.stage].shape == "stream":
            put_s = [put.end_s for put in self._tasks.puts[number] if put.end_s <= at_s]
            return max(put_s, default=at_s)
        return max(span.end_s for span in self._tasks.ran[number])

    def _reason(self, task: trace.Submitted, before_s: float) -> _Reason | None:
        """What was there last of all that a task needs."""
        at_s = min(task.at_s, before_s) + 1e-9
        reasons = [reason for reason in self._needs(task) if reason.at_s <= at_s]
        last = max(reasons, key=lambda reason: (reason.at_s, reason.cause != "worker"), default=None)
        if last is None or task.at_s - last.at_s > AT_ONCE_S:
            held = self._made(_latest(self._acknowledged, at_s), "order")
            if held and (last is None or held[0].at_s > last.at_s + AT_ONCE_S):
                return held[0]
        return last

    def _queued(self, task: trace.Submitted, begun_s: float) -> _Reason | None:
        """What its process did between the hand-out of a task and its start, where that took long."""
        if begun_s - task.at_s <= AT_ONCE_S:
            return None
        span = self._tasks.ran[task.task][0]
        ended = self._ended_in[self._tasks.process.get((span.group, span.worker), 0)]
        found = _latest(ended, begun_s)
        if found is None or found[1] == task.task or found[0] <= task.at_s:
            return None
        return _Reason(found[0], "worker", found[1])

    def _needs(self, task: trace.Submitted) -> list[_Reason]:
        """All that must be there for a task, whenever it came."""
        stage = self._stages[task.stage]
        reasons: list[_Reason] = []
        for field in (*stage.reads, *stage.awaits):
            writer = self._writer[field]
            if field in self._weights:
                reasons += self._made(self._step_done.get((writer, task.step)), "weights")
                continue
            there = [self._done[writer, group] for group in task.groups if (writer, group) in self._done]
            reasons += self._made(max(there, default=None), "field")
            outside = [self._outside[writer, group] for group in task.groups if (writer, group) in self._outside]
            reasons += [_Reason(max(outside), "field", None)] if outside else []
        if stage.reads_back:
            reasons += self._made(_latest(self._published, task.at_s), "weights")
        for before, lag in self._fences[stage.name]:
            reasons += self._made(self._step_done.get((before, task.step - lag)), "fence")
        if stage.shape != "stream":
            for group in stage.groups:
                for replica in {task.replica, None}:
                    reasons += self._made(_latest(self._freed[group, replica], task.at_s), "worker")
        if stage.shape == "transfer" and self._plan.refit == "drain":
            reasons += self._made(_latest(self._drained[stage.groups[-1]], task.at_s), "drain")
        admitted = [self._admitted[group] for group in task.groups if group in self._admitted]
        return reasons + ([_Reason(max(admitted), ROOM, None)] if admitted else [])

    def _made(self, there: tuple[float, int] | None, cause: str) -> list[_Reason]:
        return [_Reason(there[0], cause, there[1])] if there and there[1] in self._tasks.ran else []


def _latest(events: Sequence[tuple[float, int]], at_s: float) -> tuple[float, int] | None:
    """The last of events in order of time that is not after `at_s`."""
    place = bisect_right(events, (at_s + 1e-9, 1 << 62))
    return events[place - 1] if place else None
