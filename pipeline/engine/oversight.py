"""Reasons to end a run before its last step: a request to stop, and time without progress."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.declare.task import Task
from pipeline.engine.journal import Clock
from pipeline.engine.termination import Termination
from pipeline.errors import Problem, StageError
from pipeline.schedule.scheduler import Scheduler


def never() -> bool:
    """Return False. The default of `lingers` and `awaits`."""
    return False


class Oversight:
    """Watches one run. `of` names it in messages, such as "run of quickstart". `deadline_s` bounds the time in which no
    task finishes. `termination` may ask the run to stop. `lingers` returns whether the run keeps waiting for reports
    when everything is done, `awaits` whether something may arrive without a task."""

    def __init__(
        self,
        of: str,
        clock: Clock,
        *,
        termination: Termination | None,
        deadline_s: float,
        lingers: Callable[[], bool] = never,
        awaits: Callable[[], bool] = never,
    ) -> None:
        self.termination, self.stopping = termination, False
        self.failed: Task | None = None  # the task that failed, if any
        self._of, self._clock, self._deadline_s = of, clock, deadline_s
        self.lingers, self._awaits = lingers, awaits

    @property
    def must_stop(self) -> bool:
        """Whether the run was asked to stop and has not started stopping."""
        return self.termination is not None and self.termination.asked and not self.stopping

    def check(self, scheduler: Scheduler, progress_s: float) -> None:
        """Raise StageError if no task can start, or if the last progress, at `progress_s`, exceeds the deadline."""
        running = scheduler.running
        if self.must_stop or scheduler.over:
            return
        waits = "; ".join(
            f"step {step + 1} {stage} waits for {', '.join(what) or 'a worker'}"
            for step, stage, what in scheduler.waiting()
        )
        if not running and not self._awaits():
            raise StageError(
                Problem(
                    where=self._of,
                    what=f"nothing can start: {waits or 'no stage is in flight'}",
                    why="no task is running",
                    fix="report this graph: the checks should have refused it",
                )
            )
        if self._clock.now_s - progress_s > self._deadline_s:
            doing = ", ".join(dict.fromkeys(f"{task.stage} at step {task.step + 1}{_groups(task)}" for task in running))
            raise StageError(
                Problem(
                    where=self._of,
                    what=f"no task finished in {self._deadline_s:g} s; running: {doing or 'none'}",
                    why=f"every wait has a deadline; {waits}",
                    fix="raise --deadline-s, or fix the stage that hangs",
                )
            )


def _groups(task: Task) -> str:
    """Return a task's groups for a message: the first and the last."""
    if not task.groups:
        return ""
    first, last = task.groups[0], task.groups[-1]
    return f" (group {first})" if first == last else f" ({len(task.groups)} groups, {first} to {last})"
