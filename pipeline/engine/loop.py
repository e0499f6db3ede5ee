"""Carries out what the scheduler decides and tells it what is reported: all that real runs and simulations share.

The executor acts, the journal remembers; what touches disks, threads and columns are parts that a simulation does
without. `pipeline.engine.driver.Engine` puts a real run together, `pipeline.simulation.virtual_run` a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.task import Task
from pipeline.engine.checkpoints import Checkpoints
from pipeline.engine.drops import Drops
from pipeline.engine.journal import Journal
from pipeline.engine.oversight import Oversight
from pipeline.engine.reports import Notice, Report
from pipeline.engine.steps import Steps
from pipeline.errors import SluiceError, StageError
from pipeline.record import trace
from pipeline.schedule.events import (
    Admit,
    Cancel,
    Claim,
    Clear,
    Decision,
    Drop,
    Dropped,
    Event,
    Failed,
    Finished,
    GiveUp,
    Landed,
    Run,
    Save,
    Served,
    StepDone,
)
from pipeline.schedule.scheduler import Scheduler

EVERY_S = 1.0  # the longest wait for a report


class Runs(Protocol):
    """What the driver asks of an executor; `pipeline.executors.Executor` and the simulated workers are such."""

    name: str

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        """Start a task."""

    def wait(self, timeout_s: float) -> Sequence[Report | Notice]:
        """What was reported, in the order in which it came; nothing where nothing was within `timeout_s`."""

    def cancel(self, task: Task, groups: Sequence[int]) -> None:
        """Have a running stream give up groups."""

    def close(self) -> None:
        """End all workers. Idempotent."""


class Store(Protocol):
    """Where columns lie. `pipeline.engine.rows.Rows` is one; a simulation has none of them and knows their lengths."""

    def handle(self, task: Task) -> KVBatchMeta | None:
        """What a task reads; None where it reads no samples."""

    def landed(self, report: Any) -> list[Event]:
        """What is present now that a task has put what it reports."""

    def lengths(self, groups: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the longest response of each group."""

    def lost(self, groups: Sequence[int], attempt: int) -> None:
        """The worker of an attempt is lost."""

    def clear(self, step: int, groups: tuple[int, ...]) -> None:
        """Nobody will read these groups again."""

    def sweep(self, report: Any) -> None:
        """Remove what an attempt has put that was replaced."""

    def settle(self, *, wait: bool = False) -> None:
        """Record what was removed."""

    def left(self) -> int:
        """Rows that are there at the end."""

    def close(self) -> None:
        """Nothing will be removed any more. Idempotent."""


class Arrivals(Protocol):
    """What comes from outside the graph."""

    def admitted(self, step: int, groups: tuple[int, ...]) -> None:
        """Groups entered with a step: what is written of them from outside may come from now on."""

    def came(self, scheduler: Scheduler) -> Sequence[Notice]:
        """What has come since the last time."""


class Driver:
    """One run of a plan: hands the scheduler's decisions to its parts, and what they report to the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Runs,
        *,
        journal: Journal,
        rows: Store,
        steps: Steps,
        drops: Drops,
        checkpoints: Checkpoints,
        outside: Arrivals,
        oversight: Oversight,
    ) -> None:
        self.scheduler, self.executor = scheduler, executor
        self.journal, self.rows, self.steps, self.drops = journal, rows, steps, drops
        self.checkpoints, self.outside, self.oversight = checkpoints, outside, oversight
        weights = set(scheduler.plan.weights_fields)
        self._weights = {  # what a stage makes of weights, and whether they are served then
            stage.name: (tuple(field for field in stage.writes if field in weights), stage.shape == "transfer")
            for stage in scheduler.plan.stages
        }

    @property
    def stopped(self) -> bool:
        """Whether the run was asked to stop and did, before its last step."""
        return self.oversight.stopping and not self.scheduler.done

    def run(self, start: Callable[[], Iterable[trace.Placed]]) -> None:
        """Run every step that is left; `start` brings the workers up. Raises SluiceError."""
        try:
            self.journal.started(self.scheduler.start, self.executor.name)
            for placed in start():
                self.journal.write(placed)
            self._loop()
            self.rows.settle(wait=True)
            if self.scheduler.done:
                self.journal.ended(self.rows.left())
            else:
                self.journal.interrupted()
        except SluiceError as error:
            self.journal.failed(error, self.oversight.failed)
            raise
        except (KeyboardInterrupt, SystemExit):
            self.journal.interrupted()
            raise
        finally:
            self.rows.close()
            self.executor.close()
            self.journal.close()

    def _loop(self) -> None:
        oversight, scheduler, clock = self.oversight, self.scheduler, self.journal.clock
        settle, flush, wait, came = self.rows.settle, self.journal.flush, self.executor.wait, self.outside.came
        progress_s = clock.now_s
        self._carry_out(scheduler.begin())
        while True:
            if oversight.must_stop:
                oversight.stopping = True
                self.journal.stopping()
                self._carry_out(scheduler.stop())
            settle()
            flush()
            if scheduler.over and not oversight.lingers():
                return
            reports = wait(EVERY_S)
            for report in reports:  # what follows from one report comes before the next
                self._handle(self._notice(report) if isinstance(report, Notice) else self._take(report))
            notices = came(scheduler)
            for notice in notices:
                self._handle(self._notice(notice))
            if reports or notices:
                progress_s = clock.now_s
            else:
                oversight.check(scheduler, progress_s)

    def _handle(self, events: Sequence[Event]) -> None:
        if events:
            self._carry_out(self.scheduler.handle(*events))

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Run():
                    self._submit(decision.task)
                case Clear():
                    self.rows.clear(decision.step, decision.groups)
                case Admit(step=step, groups=groups):
                    self.steps.admitted(step, len(groups), self.journal.clock.now_s)
                    self.journal.admitted(step, groups, self.scheduler.version)
                    self.outside.admitted(step, groups)
                case Claim(step=step, groups=groups):
                    self.steps.claimed(step, groups)
                    self.journal.claimed(step, groups)
                case Drop():
                    self.drops.take(decision)
                case Cancel():
                    self.executor.cancel(decision.task, decision.groups)
                case Save():
                    self.drops.unheard(self.drops.cancelled)  # the checkpoint has them behind it, the record may end
                    self._handle(self.checkpoints.save(decision))
                case StepDone():
                    self._step_done(decision.step)
                case GiveUp():
                    self.oversight.failed = Task(stage=decision.stage, step=decision.step)
                    raise StageError(decision.problem)

    def _submit(self, task: Task) -> None:
        meta = self.rows.handle(task)
        self.journal.submitted(task)
        self.executor.submit(task, meta)

    def _step_done(self, step: int) -> None:
        version = self.scheduler.version
        metrics, cpu_s = self.steps.close(step, version, self.journal.clock.now_s)
        self.journal.step_ended(step, metrics, cpu_s)
        self.steps.done(step, metrics)

    # What is reported, as events for the scheduler.

    def _notice(self, notice: Notice) -> list[Event]:
        self.journal.write(notice.written)
        return [notice.event]

    def _take(self, report: Report) -> list[Event]:
        task, journal = report.task, self.journal
        for event in report.events:
            journal.write(event)
        self.steps.report(report)
        if report.error:
            self.oversight.failed = task
            raise report.error
        owed = self.scheduler.owed(task)
        if report.lost:
            return [] if owed is None else self._lost(task, tuple(owed), report.lost)
        if report.served is not None:
            return [] if owed is None else self._served(task, report.served)
        if owed is None:
            return self._fence(report)
        finished = report.finished
        if finished and owed.isdisjoint(finished):
            return []  # the same report for the second time says nothing
        events = self.rows.landed(report)
        if report.weights:
            events.append(self._made(task, report.weights))
        if report.dropped:
            gate = self.scheduler.plan.gate
            self.drops.refused(gate.stage if gate else task.stage, task.step, report.dropped)
            events.append(Dropped(task.step, dict(report.dropped), task.number))
        if self.drops.cancelled:
            self.drops.acknowledged(finished, report.cancelled)
        if finished or not task.groups:
            journal.acknowledged(task, finished)
            events.append(Finished(task, finished))
        return events

    def _fence(self, report: Report) -> list[Event]:
        """A report of an attempt that was replaced: what it has put is swept. The end of a stream is none."""
        if report.finished or report.handles or not report.task.groups:
            self.journal.fenced(report.task, report.finished)
        self.rows.sweep(report)
        return []

    def _lost(self, task: Task, owed: tuple[int, ...], reason: str) -> list[Event]:
        """The worker of a task is another one now: what it had not acknowledged goes out again, as the next attempt."""
        self.drops.unheard(owed)
        self.journal.retried(task, owed, reason)
        self.rows.lost(owed, task.attempt)
        return [Failed(task)]

    def _served(self, task: Task, replica: int) -> list[Event]:
        """A replica has the version that a transfer brings."""
        self.journal.served(task, replica)
        return [Served(task, replica)]

    def _made(self, task: Task, weights: tuple[int, str]) -> Landed:
        """A stage has made weights, or published them."""
        fields, served = self._weights[task.stage]
        if served:
            now_s = self.journal.clock.now_s
            self.journal.published(task, *weights, now_s)
            self.steps.published(task.step, now_s)
        return Landed(task.step, (), fields, task=task.number)
