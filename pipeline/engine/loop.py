"""Carries out the scheduler's decisions and passes reports back to it. Shared by real runs and simulations.

The executor acts, the journal records. Disks, threads and columns are behind interfaces that a simulation replaces.
`pipeline.engine.driver.Driver` assembles a real run, `pipeline.simulation.virtual_run` a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol

from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.task import Task
from pipeline.engine.checkpoints import Checkpoints
from pipeline.engine.drops import Drops
from pipeline.engine.journal import Journal
from pipeline.engine.oversight import Oversight
from pipeline.engine.reports import Notice, TaskReport
from pipeline.engine.steps import Steps
from pipeline.errors import CheckpointError, SluiceError, StageError
from pipeline.record import trace
from pipeline.schedule.events import (
    Admit,
    AttemptLost,
    Cancel,
    Claim,
    Clear,
    Decision,
    Drop,
    Event,
    Finished,
    GiveUp,
    GroupsDropped,
    Landed,
    ReplicaServed,
    Run,
    Save,
    StepDone,
)
from pipeline.schedule.scheduler import Scheduler

EVERY_S = 1.0  # the longest wait for a report
START_S = 1800.0  # for a start, and for the last checkpoint, whatever the deadline of a task
_LAST = "its last checkpoint is written"


class RunsTasks(Protocol):
    """What the driver needs of an executor. `pipeline.executors.Executor` and the simulated workers implement it."""

    name: str

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        """Start a task."""

    def wait(self, timeout_s: float) -> Sequence[TaskReport | Notice]:
        """Return reports in order of arrival; empty if none arrives within `timeout_s`."""

    def cancel(self, task: Task, groups: Sequence[int]) -> None:
        """Ask a running stream to cancel groups."""

    def close(self) -> None:
        """Stop all workers. Idempotent."""


class Store(Protocol):
    """Access to a run's columns, such as `pipeline.engine.run_rows.RunRows`. A simulation has only their lengths."""

    def handle(self, task: Task) -> KVBatchMeta | None:
        """Return the handle of a task's inputs; None if it reads no samples."""

    def landed(self, report: Any) -> list[Event]:
        """Return an event for each field that a report's puts have made present."""

    def lengths(self, groups: Sequence[int]) -> tuple[int, ...]:
        """Return the longest response of each group, in tokens."""

    def lost(self, groups: Sequence[int], attempt: int) -> None:
        """Record that the worker of an attempt was lost."""

    def clear(self, decision: Clear) -> None:
        """Clear partitions of groups that have no remaining reader."""

    def sweep(self, report: Any) -> None:
        """Remove the rows put by a replaced attempt."""

    def settle(self, *, wait: bool = False) -> None:
        """Record the removals that are done, or with `wait` all of them."""

    def left(self) -> int:
        """Return the number of rows left at the end."""

    def close(self) -> None:
        """Finish pending removals; no more may follow. Idempotent."""


class Arrivals(Protocol):
    """Fields that processes outside the graph write."""

    def admitted(self, step: int, groups: tuple[int, ...]) -> None:
        """Note that groups were admitted to a step: their outside fields may arrive from now on."""

    def came(self, scheduler: Scheduler) -> Sequence[Notice]:
        """Return what has arrived since the last call."""


class Loop:
    """One run of a plan: passes the scheduler's decisions to its components and their reports to the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: RunsTasks,
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
        self._weights = {  # by stage: the weights fields that it writes, and whether it publishes them
            stage.name: (tuple(field for field in stage.writes if field in weights), stage.shape == "transfer")
            for stage in scheduler.plan.stages
        }

    @property
    def stopped(self) -> bool:
        """Whether the run stopped on request, before its last step."""
        return self.oversight.stopping and not self.scheduler.done

    def run(self, start: Callable[[], Iterable[trace.Placed]]) -> None:
        """Run the remaining steps; `start` starts the workers. Raises SluiceError."""
        complete = False
        try:
            self.journal.started(self.scheduler.start, self.executor.name)
            with self.oversight.bounded(self.scheduler, "its workers start", START_S):
                for placed in start():
                    self.journal.write(placed)
            with self.oversight.bounded(self.scheduler):
                self._loop()
            with self.oversight.bounded(self.scheduler, _LAST, START_S):
                self.rows.settle(wait=True)
                self.checkpoints.settle(self.scheduler.complete, wait=True)
            if self.scheduler.done:
                self.journal.ended(self.rows.left())
                self.journal.flush()  # what is left to end may take seconds, or fail
            else:
                self.journal.interrupted()
            complete = True
        except SluiceError as error:
            with suppress(SluiceError), self.oversight.bounded(self.scheduler, _LAST, START_S):
                self.checkpoints.end(wait=True)
            self.journal.failed(error, self.oversight.failed)
            raise
        except (KeyboardInterrupt, SystemExit):
            self.journal.interrupted()
            raise
        finally:
            self.checkpoints.end(wait=False)
            self.rows.close()
            for close in (self.executor.close, self.oversight.close, self.journal.close):
                with nullcontext() if complete else suppress(CheckpointError, OSError):  # the first error says more
                    close()

    def _loop(self) -> None:
        oversight, scheduler = self.oversight, self.scheduler
        settle, flush, wait, came = self.rows.settle, self.journal.flush, self.executor.wait, self.outside.came
        saved = self.checkpoints.settle
        self._carry_out(scheduler.begin())
        while True:
            if oversight.must_stop:
                oversight.stopping = True
                self.journal.stopping()
                self._carry_out(scheduler.stop())
            settle()
            saved(scheduler.complete)
            flush()
            if scheduler.over and not oversight.lingers():
                return
            reports = wait(EVERY_S)
            for report in reports:  # handle each report completely before the next
                self._handle(self._notice(report) if isinstance(report, Notice) else self._take(report))
            notices = came(scheduler)
            for notice in notices:
                self._handle(self._notice(notice))
            if notices or any(map(_tells, reports)):
                oversight.progressed()
            else:
                oversight.check(scheduler)

    def _handle(self, events: Sequence[Event]) -> None:
        if events:
            self._carry_out(self.scheduler.handle(*events))

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Run():
                    self._submit(decision.task)
                case Clear():
                    self.rows.clear(decision)
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
                    self.drops.unheard(self.drops.cancelled)  # a resumed run would never record them
                    with self.oversight.doing(f"the state after step {decision.step + 1} is being saved"):
                        saved = self.checkpoints.save(decision)
                    self._handle(saved)
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

    # Reports, translated into events for the scheduler.

    def _notice(self, notice: Notice) -> list[Event]:
        for event in notice.written:
            self.journal.write(event)
        return [notice.event]

    def _take(self, report: TaskReport) -> list[Event]:
        task, journal = report.task, self.journal
        for event in report.events:
            journal.reported(event)
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
        if report.open is not None:
            journal.opened(task, report.open)
        finished = report.finished
        if finished and owed.isdisjoint(finished):
            return []  # a repeated report
        events = self.rows.landed(report)
        if report.weights:
            events.append(self._made(task, report.weights))
        if report.dropped:
            gate = self.scheduler.plan.gate
            self.drops.refused(gate.stage if gate else task.stage, task.step, report.dropped)
            events.append(GroupsDropped(task.step, dict(report.dropped), task.number))
        if self.drops.cancelled:
            self.drops.acknowledged(finished, report.cancelled)
        if finished or not task.groups:
            journal.acknowledged(task, finished)
            events.append(Finished(task, finished))
        return events

    def _fence(self, report: TaskReport) -> list[Event]:
        """Ignore a report of a replaced attempt and remove its puts. A stream's empty last report is not recorded."""
        if report.finished or report.handles or not report.task.groups:
            self.journal.fenced(report.task, report.finished)
        self.rows.sweep(report)
        return []

    def _lost(self, task: Task, owed: tuple[int, ...], reason: str) -> list[Event]:
        """Handle the loss of a task's worker: its unacknowledged groups are submitted again, as the next attempt."""
        self.drops.unheard(owed)
        self.journal.retried(task, owed, reason)
        self.rows.lost(owed, task.attempt)
        return [AttemptLost(task)]

    def _served(self, task: Task, replica: int) -> list[Event]:
        """Record that a replica has the version of a transfer."""
        self.journal.served(task, replica)
        return [ReplicaServed(task, replica)]

    def _made(self, task: Task, weights: tuple[int, str]) -> Landed:
        """Return the event for new weights of a stage; record them if it publishes them."""
        fields, served = self._weights[task.stage]
        if served:
            now_s = self.journal.clock.now_s
            self.journal.published(task, *weights, now_s)
            self.steps.published(task.step, now_s)
        return Landed(task.step, (), fields, task=task.number)


def _tells(report: TaskReport | Notice) -> bool:
    """Return whether a report says more than how many samples are open: others do not end the wait for a task."""
    return isinstance(report, Notice) or report.open is None or bool(report.finished or report.error)
