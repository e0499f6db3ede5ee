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

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from pipeline.analysis.waits import ROOM, Reason, Waits
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record.history import Tasks

DRIVER = "driver"
NOBODY = "no stage"


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a step on the path, in the mean.

    `by_stage` has "no stage" for what is of none; `by_cause` says why a stage was waited for; `steps` has
    `by_stage` of every step; `sentence` says it in words.
    """

    by_stage: dict[str, float]
    by_cause: dict[str, float]
    steps: tuple[dict[str, float], ...]
    sentence: str


class PathSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A part of the path. `task`, `group` and `worker` are the task's number and where it ran: of several workers the
    one that ended last. They are None, "" and None where the time is of no stage. `field` is the column or the weights
    that it made and that was waited for; empty where the cause is another. Times are monotonic seconds."""

    stage: str
    cause: str
    field: str
    task: int | None
    group: str
    worker: int | None
    start_s: float
    end_s: float


class StepPath(msgspec.Struct, frozen=True, kw_only=True):
    """The path of one step, from the version before to its own: spans in order of time, each beginning where the one
    before it ends. `step` counts from 0."""

    step: int
    start_s: float
    end_s: float
    spans: tuple[PathSpan, ...]

    def seconds(self, what: str) -> dict[str, float]:
        """Seconds by `stage` or by `cause`, the largest first."""
        return _summed((getattr(span, what), span.end_s - span.start_s) for span in self.spans)


def critical_path(
    plan: Plan, tasks: Tasks, ends: Sequence[tuple[float, int]], *, waits: Waits | None = None
) -> CriticalPath:
    """The path of every step, summed. `ends` are the times at which steps ended and their numbers, the first of which
    is not looked at: there the second begins."""
    steps = step_paths(plan, tasks, ends, waits=waits)
    ends_s = [end_s for end_s, _ in ends]
    by_stage = mean_seconds(steps, "stage")
    return CriticalPath(
        by_stage=by_stage,
        by_cause=mean_seconds(steps, "cause"),
        steps=tuple(step.seconds("stage") for step in steps),
        sentence=sentence(plan, tasks, by_stage, ends_s),
    )


def step_paths(
    plan: Plan, tasks: Tasks, ends: Sequence[tuple[float, int]], *, waits: Waits | None = None
) -> tuple[StepPath, ...]:
    """The path of every step but the first of `ends`, as spans that tile it."""
    walker = Walker(tasks, waits or Waits(plan, tasks))
    return tuple(walker.walk(start_s, end_s, step) for (start_s, _), (end_s, step) in pairwise(ends))


def mean_seconds(steps: Sequence[StepPath], what: str) -> dict[str, float]:
    """Seconds a step by `stage` or by `cause`, the largest first."""
    return _summed((name, spent_s / len(steps)) for step in steps for name, spent_s in step.seconds(what).items())


def _summed(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of each name, the largest first."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in parts:
        sums[name] += value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def sentence(plan: Plan, tasks: Tasks, by_stage: dict[str, float], ends_s: Sequence[float]) -> str:
    """What bounds a step, and how long the stage that it bounds waited. `by_stage` are the path's seconds a step."""
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


class Walker:
    """Walks from what was there last to what that waited for, and on."""

    def __init__(self, tasks: Tasks, waits: Waits) -> None:
        self._tasks, self._waits = tasks, waits
        self._before: dict[int, Reason | None] = {}

    def walk(self, start_s: float, end_s: float, step: int) -> StepPath:
        """The path between two times, the later of which is the end of a step."""
        ended = self._waits.ended(step)
        spans, at_s, last = self.back(Reason(end_s, "field", ended) if ended is not None else None, start_s, end_s)
        spans.append(_nobodys(ROOM if last and last.cause == ROOM else DRIVER, start_s, at_s))
        ordered = tuple(span for span in reversed(spans) if span.end_s > span.start_s)
        return StepPath(step=step, start_s=start_s, end_s=end_s, spans=ordered)

    def back(self, reason: Reason | None, start_s: float, end_s: float) -> tuple[list[PathSpan], float, Reason | None]:
        """What `reason` and all before it took between two times: spans, the last one first, back to which time they
        reach, and what was there then, where no task made it."""
        spans: list[PathSpan] = []
        at_s = end_s
        while reason is not None and at_s > start_s:
            there_s = max(start_s, min(at_s, reason.at_s))
            spans.append(_nobodys(DRIVER, there_s, at_s))
            at_s = there_s
            if reason.task is None:
                return spans, at_s, reason
            begun_s = max(start_s, min(at_s, min(span.start_s for span in self._tasks.ran[reason.task])))
            worked_s = min(at_s, max(begun_s, self._waits.worked_until(reason.task, at_s)))
            spans.append(_nobodys(DRIVER, worked_s, at_s))
            spans.append(self._worked(reason, begun_s, worked_s))
            at_s = begun_s
            reason = self._reason(reason.task, at_s)
        return spans, at_s, None

    def _reason(self, number: int, begun_s: float) -> Reason | None:
        """What a task waited for that began then."""
        task = self._tasks.submitted[number]
        if begun_s < task.at_s:  # what is walked through does not go back to its start
            return self._waits.queued(task, begun_s) or self._waits.last(task, begun_s)
        if number not in self._before:
            self._before[number] = self._waits.queued(task, begun_s) or self._waits.last(task, begun_s)
        return self._before[number]

    def _worked(self, reason: Reason, start_s: float, end_s: float) -> PathSpan:
        assert reason.task is not None
        last = max(self._tasks.ran[reason.task], key=lambda span: span.end_s)
        return PathSpan(
            stage=last.stage, cause=reason.cause, field=reason.field, task=reason.task, group=last.group,
            worker=last.worker, start_s=start_s, end_s=end_s,
        )  # fmt: skip


def _nobodys(cause: str, start_s: float, end_s: float) -> PathSpan:
    return PathSpan(stage=NOBODY, cause=cause, field="", task=None, group="", worker=None, start_s=start_s, end_s=end_s)
