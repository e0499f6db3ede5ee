"""Writes the record of a run: one trace event for each decision carried out and each report taken.

Real runs and simulations write the same events. Knows no scheduling rules.

    journal = Journal(plan, WallClock(), TraceWriter(run_dir.events))
    journal.submitted(task)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from pipeline.declare.task import Task
from pipeline.engine.divergence import DivergenceNotice
from pipeline.engine.open_counts import OpenCounts
from pipeline.errors import Problem, SluiceError
from pipeline.plan.plan import Plan
from pipeline.record import trace

AGAIN_S = 5.0  # all tasks of a lost worker are reported within it


class Clock(Protocol):
    """A source of time."""

    @property
    def now_s(self) -> float:
        """Seconds on a monotonic clock."""

    @property
    def wall_s(self) -> float:
        """Seconds since 1970."""


class WallClock:
    """The clock of this machine."""

    @property
    def now_s(self) -> float:
        return time.monotonic()

    @property
    def wall_s(self) -> float:
        return time.time()


class Pen(Protocol):
    """A destination of events, such as a `TraceWriter`."""

    def write(self, event: trace.TraceEvent) -> object:
        """Write one event."""

    def flush(self) -> None:
        """Pass the written events to the operating system."""

    def close(self) -> None:
        """Close the record. Idempotent."""


class Journal:
    """The record of one run. The driver uses the same `clock`. `says` is called once for each lost worker."""

    def __init__(self, plan: Plan, clock: Clock, pen: Pen, says: Callable[[Problem], None] | None = None) -> None:
        self.clock = clock
        self.write, self._flush, self.close = pen.write, pen.flush, pen.close
        self._open = OpenCounts()
        self.weights: dict[int, str] = {}  # the last published version and its hash
        self._plan = plan
        self._groups = {stage.name: stage.groups[0] for stage in plan.stages if stage.groups}
        self._replaced: set[int] = set()  # numbers of tasks whose worker was lost
        self._says, self._said_s = says, dict[str, float]()  # when a loss was said

    def started(self, start: int, executor: str) -> None:
        """Record that the run starts after `start` steps."""
        plan, clock = self._plan, self.clock
        self.write(
            trace.Started(
                graph=plan.name,
                start=start,
                steps=plan.steps,
                executor=executor,
                monotonic_s=clock.now_s,
                wall_s=clock.wall_s,
            )
        )

    def admitted(self, step: int, groups: tuple[int, ...], version: int) -> None:
        """Record that groups were admitted."""
        self.write(trace.Admitted(step=step, groups=groups, version=version, at_s=self.clock.now_s))

    def claimed(self, step: int, groups: tuple[int, ...]) -> None:
        """Record the groups that form the batch of a step."""
        self.write(trace.Claimed(step=step, groups=groups, at_s=self.clock.now_s))

    def submitted(self, task: Task) -> None:
        """Record that a task was submitted to its workers."""
        self.write(
            trace.Submitted(
                task=task.number,
                stage=task.stage,
                step=task.step,
                attempt=task.attempt,
                group=self._groups[task.stage],
                replica=task.replica,
                groups=task.groups,
                samples=len(task.groups) * self._plan.group_size,
                version=task.version,
                at_s=self.clock.now_s,
            )
        )

    def reported(self, event: trace.TraceEvent) -> None:
        """Record an event of a worker, without metrics that are not finite."""
        if isinstance(event, trace.Ran) and not all(map(math.isfinite, event.metrics.values())):
            event = msgspec.structs.replace(event, metrics=trace.finite(event.metrics))
        self.write(event)

    def opened(self, task: Task, parts: Mapping[str, int]) -> None:
        """Take the counts of a worker's unfinished samples, to be recorded with those of others."""
        self._open.take(task, parts)

    def flush(self) -> None:
        """Write the counts that are due, and pass everything to the operating system."""
        for stage, parts in self._open.due(self.clock.now_s):
            self.write(trace.OpenSamples(stage=stage, parts=parts, at_s=round(self.clock.now_s, 1)))
        self._flush()

    def acknowledged(self, task: Task, groups: tuple[int, ...]) -> None:
        """Record that a task has acknowledged groups."""
        self.write(
            trace.Acknowledged(
                task=task.number,
                stage=task.stage,
                step=task.step,
                attempt=task.attempt,
                groups=groups,
                at_s=self.clock.now_s,
            )
        )

    def retried(self, task: Task, groups: tuple[int, ...], reason: str) -> None:
        """Record that an attempt was lost, and its unacknowledged groups."""
        self._replaced.add(task.number)
        self._open.take(task, {})
        now_s = self.clock.now_s
        self.write(trace.Retried(**trace.of(task), groups=groups, reason=reason, at_s=now_s))
        if self._says and now_s - self._said_s.get(reason, -math.inf) > AGAIN_S:
            self._said_s[reason] = now_s
            why = "its tasks run again, on a worker that takes its place"
            fix = "if it happens again, look into logs/ of the run"
            self._says(Problem(where=f"step {task.step + 1}", what=reason, why=why, fix=fix, warning=True))

    def fenced(self, task: Task, groups: tuple[int, ...]) -> None:
        """Record that a report of a replaced attempt was ignored. Repeated reports of a task are not recorded."""
        if task.number in self._replaced:
            self.write(trace.Fenced(**trace.of(task), groups=groups, at_s=self.clock.now_s))

    def served(self, task: Task, replica: int) -> None:
        """Record that a replica has the version of a transfer."""
        now_s = self.clock.now_s
        self.write(trace.Served(**trace.of(task), replica=replica, version=task.step + 1, at_s=now_s))

    def published(self, task: Task, version: int, sha256: str, at_s: float) -> None:
        """Record that all replicas have a version."""
        self.weights = {version: sha256}
        self.write(trace.Published(stage=task.stage, step=task.step, version=version, sha256=sha256, at_s=at_s))

    def dropped(self, stage: str, step: int, groups: tuple[int, ...], reason: str, tokens: tuple[int, ...]) -> None:
        """Record that groups were dropped."""
        self.write(
            trace.Dropped(stage=stage, step=step, groups=groups, reason=reason, tokens=tokens, at_s=self.clock.now_s)
        )

    def held(self, step: int, start_s: float) -> None:
        """Record that the state of a checkpoint, begun at `start_s`, was copied or written."""
        self.write(trace.Held(step=step, start_s=start_s, end_s=self.clock.now_s))

    def checkpointed(self, step: int, folder: str, size_bytes: int, start_s: float) -> None:
        """Record a complete checkpoint that was begun at `start_s`."""
        self.write(
            trace.Checkpointed(step=step, folder=folder, size_bytes=size_bytes, start_s=start_s, end_s=self.clock.now_s)
        )

    def removed(self, step: int, folder: str) -> None:
        """Record that a checkpoint is about to be removed."""
        self.write(trace.Removed(step=step, folder=folder, at_s=self.clock.now_s))

    def step_ended(self, step: int, metrics: dict[str, float], cpu_s: tuple[float, float]) -> None:
        """Record the end of a step. `cpu_s`: CPU seconds of the driver and of all processes."""
        self.write(
            trace.StepEnded(
                step=step,
                metrics=trace.finite(metrics),
                at_s=self.clock.now_s,
                driver_cpu_s=cpu_s[0],
                processes_cpu_s=cpu_s[1],
            )
        )

    def diverged(self, notice: DivergenceNotice, problem: str) -> None:
        """Record a sign of divergence, and its text."""
        self.write(
            trace.Diverged(
                step=notice.step,
                kind=notice.kind,
                metric=notice.metric,
                value=notice.value if math.isfinite(notice.value) else None,
                before=notice.before,
                problem=problem,
                at_s=self.clock.now_s,
            )
        )

    def stopping(self) -> None:
        """Record that the run was asked to stop."""
        self.write(trace.Stopping(at_s=self.clock.now_s))

    def failed(self, error: SluiceError, task: Task | None) -> None:
        """Record the error that ended the run, and the task that failed, if any."""
        stage, step = (task.stage, task.step) if task else (None, None)
        self._ended_early(stage, step, type(error).__name__, tuple(map(str, error.problems)))

    def interrupted(self) -> None:
        """Record that the run was interrupted or stopped on request."""
        self._ended_early(None, None, "interrupted", ())

    def _ended_early(self, stage: str | None, step: int | None, error: str, problems: Sequence[str]) -> None:
        now_s = self.clock.now_s
        self.write(trace.Failed(stage=stage, step=step, error=error, problems=tuple(problems), at_s=now_s))

    def ended(self, rows_left: int) -> None:
        """Record that every step is done."""
        self.write(trace.Ended(steps=self._plan.steps, rows_left=rows_left, at_s=self.clock.now_s))
