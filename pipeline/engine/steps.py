"""The metrics of each step: written to metrics.jsonl and the trace, and passed to listeners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pipeline.engine.stored import Stored
from pipeline.engine.tally import Tally
from pipeline.engine.usage import Usage
from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.record.history import covered_s
from pipeline.rundir import RunDir, private
from pipeline.writing import recording

if TYPE_CHECKING:
    from pipeline.executors.outputs import TaskResult

StepListener = Callable[[int, dict[str, float]], None]


class Steps(Protocol):
    """What the driver reports about each step in flight."""

    def admitted(self, step: int, groups: int, at_s: float) -> None:
        """Count groups admitted to a step."""

    def claimed(self, step: int, groups: Sequence[int]) -> None:
        """Note the groups of its batch."""

    def dropped(self, step: int, groups: Sequence[int], reason: str) -> None:
        """Count groups dropped from it. `reason` is the gate's name, STALE or CANCELLED."""

    def report(self, report: Any) -> None:
        """Add the metrics of a task's report."""

    def published(self, step: int, at_s: float) -> None:
        """Note that its weights were published."""

    def close(self, step: int, version: int, now_s: float) -> tuple[dict[str, float], tuple[float, float]]:
        """Close a finished step. Returns its metrics, and CPU seconds of the driver and of all processes so far."""

    def done(self, step: int, metrics: dict[str, float]) -> None:
        """Handle a step that is finished and recorded."""


class Numbers:
    """The `Steps` of a real run. A step lasts from one published version to the next."""

    def __init__(
        self, plan: Plan, run_dir: RunDir | None, start: int, listeners: Sequence[StepListener], stored: Stored
    ) -> None:
        self._tally, self._usage, self._stored = Tally(plan), Usage(), stored
        self._metrics = run_dir.metrics if run_dir else None
        self._start, self._listeners = start, listeners
        self._writer = {field: stage.name for stage in plan.stages for field in stage.writes}
        self._transfers = {stage.name for stage in plan.stages if stage.shape == "transfer"}
        self._published_s = 0.0
        self.admitted, self.claimed, self.dropped = self._tally.admitted, self._tally.claimed, self._tally.dropped

    def report(self, report: TaskResult) -> None:
        """Add the metrics of a task, and the seconds of its slowest worker."""
        task = report.task
        groups = [group for group in report.finished if group not in report.cancelled]
        self._tally.report(task, report.metrics, report.samples if task.groups else 0, groups)
        self._tally.count(task.step, report.counts)
        for event in report.events:
            if isinstance(event, trace.Got):
                for field, size in zip(event.fields, event.field_bytes):
                    self._tally.count(task.step, {f"bytes_{self._writer[field]}_to_{event.stage}": size})
        spans = [event for event in report.events if isinstance(event, trace.Ran)]
        if not spans:
            return
        if task.stage in self._transfers:  # the two sides run in sequence or together
            took_s = covered_s((span.start_s, span.end_s) for span in spans)
        else:
            taken_s: dict[tuple[str, int], float] = {}  # by worker; workers that share a task run at the same time
            for span in spans:
                worker = (span.group, span.worker)
                taken_s[worker] = taken_s.get(worker, 0.0) + span.end_s - span.start_s
            took_s = max(taken_s.values())
        self._tally.took(task.step, task.stage, took_s)

    def published(self, step: int, at_s: float) -> None:
        if step >= self._start:
            self._tally.took(step, "step", at_s - self._published_s)
        self._published_s = at_s

    def close(self, step: int, version: int, now_s: float) -> tuple[dict[str, float], tuple[float, float]]:
        metrics = self._tally.close(step, now_s) | self._stored.peaks()
        if self._metrics:
            with recording(self._metrics), private(self._metrics).open("ab") as file:
                line = {"step": step + 1, "version": version, **trace.finite(metrics)}
                file.write(msgspec.json.encode(line) + b"\n")
        return metrics, self._usage.read()

    def done(self, step: int, metrics: dict[str, float]) -> None:
        for listener in self._listeners:
            listener(step, metrics)
