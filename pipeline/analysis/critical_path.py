"""The critical path of a run, traced back from each published version. Pure; from trace events alone.

A task starts when the last of its prerequisites is ready. That one is on the path and is charged the time since its own
start, from where the walk continues back to the previous version. The seconds of a step thus split completely into

    (stage, cause)    a stage that ran, and why the next one waited for it:
                      field     it wrote a column that the next one reads
                      weights   it made the weights that the next one reads, or the version that it samples with
                      fence     the two must not overlap
                      worker    it occupied the next one's worker
                      drain     it was a stream that had to finish before the weights were swapped
                      order     the scheduler held the next one back until it was done
    ("no stage", "driver")    nothing on the path ran: reports or tasks were in transit, or the driver was busy
    ("no stage", "room")      groups were not admitted yet

A task of episodes is divided further, along the episode that ended last: `pipeline.declare.times` names the parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from pipeline.analysis.episodes import divided
from pipeline.analysis.waits import ROOM, Reason, Waits
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record.history import Tasks

DRIVER = "driver"
NOBODY = "no stage"


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds per step on the path.

    `by_stage` uses "no stage" for time outside stages; `by_cause` is why the next stage waited; `by_part` has the parts
    of stages that have some, such as those of episodes; `steps` holds `by_stage` for every step; `sentence` sums it up.
    """

    by_stage: dict[str, float]
    by_cause: dict[str, float]
    by_part: dict[str, dict[str, float]] = {}
    steps: tuple[dict[str, float], ...]
    sentence: str


class PathSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A part of the path. `task`, `group` and `worker` are the task's number and where it ran (of several workers, the
    one that finished last); None, "" and None for time outside stages. `field` is the column or weights that the next
    task waited for; empty for other causes. `part` is what the task's samples did, if the record says so. Times are
    monotonic seconds."""

    stage: str
    cause: str
    field: str
    task: int | None
    group: str
    worker: int | None
    start_s: float
    end_s: float
    part: str = ""


class StepPath(msgspec.Struct, frozen=True, kw_only=True):
    """The path of one step, from the previous version to its own: contiguous spans in time order. `step` counts from
    0."""

    step: int
    start_s: float
    end_s: float
    spans: tuple[PathSpan, ...]

    def seconds(self, what: str) -> dict[str, float]:
        """Return the seconds by `stage` or `cause`, largest first."""
        return _summed((getattr(span, what), span.end_s - span.start_s) for span in self.spans)


def critical_path(
    plan: Plan, tasks: Tasks, ends: Sequence[tuple[float, int]], *, waits: Waits | None = None
) -> CriticalPath:
    """Return the summed path of every step. `ends` are (end time, step number); the first entry only marks the start of
    the second step."""
    steps = step_paths(plan, tasks, ends, waits=waits)
    ends_s = [end_s for end_s, _ in ends]
    by_stage = mean_seconds(steps, "stage")
    return CriticalPath(
        by_stage=by_stage,
        by_cause=mean_seconds(steps, "cause"),
        by_part=mean_parts(steps),
        steps=tuple(step.seconds("stage") for step in steps),
        sentence=sentence(plan, tasks, by_stage, ends_s),
    )


def step_paths(
    plan: Plan, tasks: Tasks, ends: Sequence[tuple[float, int]], *, waits: Waits | None = None
) -> tuple[StepPath, ...]:
    """Return the path of every step after the first entry of `ends`, as contiguous spans."""
    walker = Walker(tasks, waits or Waits(plan, tasks))
    return tuple(walker.walk(start_s, end_s, step) for (start_s, _), (end_s, step) in pairwise(ends))


def mean_seconds(steps: Sequence[StepPath], what: str) -> dict[str, float]:
    """Return the seconds per step by `stage` or `cause`, largest first."""
    return _summed((name, spent_s / len(steps)) for step in steps for name, spent_s in step.seconds(what).items())


def mean_parts(steps: Sequence[StepPath]) -> dict[str, dict[str, float]]:
    """Return the seconds per step of the parts of each stage that has some, largest first; "" is the rest."""
    spans = [span for step in steps for span in step.spans]
    return {
        stage: _summed((span.part, (span.end_s - span.start_s) / len(steps)) for span in spans if span.stage == stage)
        for stage in dict.fromkeys(span.stage for span in spans if span.part)
    }


def _summed(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum per name, largest first."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in parts:
        sums[name] += value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def sentence(plan: Plan, tasks: Tasks, by_stage: dict[str, float], ends_s: Sequence[float]) -> str:
    """Describe which stage bounds a step and how long the stage that it bounds waited. `by_stage` holds seconds per
    step."""
    total_s = sum(by_stage.values())
    if not total_s:
        return "no step has ended since the run was last started"
    first = next(iter(by_stage))
    what = "bound by the driver" if first == NOBODY else f"{first}-bound"
    text = f"{what}: {100 * by_stage[first] / total_s:.0f} % of the step"
    trainers = [stage for stage in plan.stages if stage.updates]
    samplers = [stage for stage in plan.stages if stage.reads_back]
    waiting = samplers if first in {stage.name for stage in trainers} else trainers
    for stage in waiting[:1]:
        text += f"; {stage.name} waited {_idle(tasks, stage, ends_s[0], ends_s[-1]) / (len(ends_s) - 1):.2f} s per step"
    return text


def _idle(tasks: Tasks, stage: PlannedStage, start_s: float, end_s: float) -> float:
    """Return the seconds without a running task of the stage."""
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
    """Walks back from each last prerequisite to its own last prerequisite."""

    def __init__(self, tasks: Tasks, waits: Waits) -> None:
        self._tasks, self._waits = tasks, waits
        self._before: dict[int, Reason | None] = {}

    def walk(self, start_s: float, end_s: float, step: int) -> StepPath:
        """Return the path between two times; the later one is the end of a step."""
        ended = self._waits.ended(step)
        spans, at_s, last = self.back(Reason(end_s, "field", ended) if ended is not None else None, start_s, end_s)
        spans.append(_nobodys(ROOM if last and last.cause == ROOM else DRIVER, start_s, at_s))
        ordered = tuple(part for span in reversed(spans) if span.end_s > span.start_s for part in self._divided(span))
        return StepPath(step=step, start_s=start_s, end_s=end_s, spans=ordered)

    def _divided(self, span: PathSpan) -> Iterable[PathSpan]:
        """Return the parts of a span, if the record has them."""
        spent = self._tasks.spent.get(span.task) if span.task is not None else None
        if not spent:
            return (span,)
        return [
            msgspec.structs.replace(span, part=part.name, start_s=part.start_s, end_s=part.end_s)
            for part in divided(spent, span.start_s, span.end_s)
        ]

    def back(self, reason: Reason | None, start_s: float, end_s: float) -> tuple[list[PathSpan], float, Reason | None]:
        """Return (spans, start, reason): the spans of `reason` and its predecessors between two times, last first; the
        time at which the first of them starts; and the prerequisite ready at that time, if no task made it."""
        spans: list[PathSpan] = []
        at_s, now_s, now = end_s, end_s, set[int]()  # now: the tasks of the path at now_s
        while reason is not None and at_s > start_s:
            if at_s < now_s:
                now_s, now = at_s, set()
            if reason.task in now:  # only in a damaged record do tasks wait for each other
                return spans, at_s, None
            if reason.task is not None:
                now.add(reason.task)
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
        """Return what a task that started at `begun_s` waited for."""
        task = self._tasks.submitted[number]
        if begun_s < task.at_s:  # spans inside the walk do not reach back to their start
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
