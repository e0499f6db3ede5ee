"""Reasons to end a run before its last step: a request to stop, and time without progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from pipeline.declare.task import Task
from pipeline.engine.journal import Clock
from pipeline.engine.termination import Termination
from pipeline.engine.watchdog import Watchdog
from pipeline.errors import Problem, StageError
from pipeline.schedule.scheduler import Scheduler


def never() -> bool:
    """Return False. The default of `lingers` and `awaits`."""
    return False


class Oversight:
    """Watches one run. `of` names it in messages, such as "run of quickstart". `deadline_s` bounds the time in which no
    task finishes; `watchdog` holds the calls of the driver itself to it. `termination` may ask the run to stop.
    `lingers` returns whether the run keeps waiting for reports when everything is done, `awaits` whether something may
    arrive without a task."""

    def __init__(
        self,
        of: str,
        clock: Clock,
        *,
        termination: Termination | None,
        deadline_s: float,
        watchdog: Watchdog | None = None,
        lingers: Callable[[], bool] = never,
        awaits: Callable[[], bool] = never,
    ) -> None:
        self.termination, self.stopping = termination, False
        self.failed: Task | None = None  # the task that failed, if any
        self._of, self._clock, self._deadline_s, self._watchdog = of, clock, deadline_s, watchdog
        self._progress_s, self._does = clock.now_s, ""
        self.lingers, self._awaits = lingers, awaits

    @property
    def must_stop(self) -> bool:
        """Whether the run was asked to stop and has not started stopping."""
        return self.termination is not None and self.termination.asked and not self.stopping

    @contextmanager
    def bounded(self, scheduler: Scheduler, phase: str = "", least_s: float = 0.0) -> Iterator[None]:
        """Watch the deadline within the context, or `least_s` if that is longer. Raises StageError at it, also in the
        middle of a stage's code. `phase` says what happens if no task runs."""
        self.progressed()
        stuck = partial(_stuck, self._of, phase, max(self._deadline_s, least_s))
        error_at = stuck if phase else partial(self._overdue, scheduler)
        with self._watchdog.within(error_at, least_s) if self._watchdog else nullcontext():
            yield

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Let an error at the deadline say what the driver does in the context."""
        self._does = what
        yield
        self._does = ""  # an error leaves it, for the message

    def progressed(self) -> None:
        """Note that a task has finished, or that something has arrived."""
        self._progress_s = self._clock.now_s
        if self._watchdog:
            self._watchdog.progressed()

    def check(self, scheduler: Scheduler) -> None:
        """Raise StageError if no task can start, or if the last progress is longer ago than the deadline."""
        if self.must_stop or scheduler.over:
            return
        if not scheduler.running and not self._awaits():
            raise StageError(
                Problem(
                    where=self._of,
                    what=f"nothing can start: {_waits(scheduler) or 'no stage is in flight'}",
                    why="no task is running",
                    fix="report this graph: the checks should have refused it",
                )
            )
        if self._clock.now_s - self._progress_s > self._deadline_s:
            raise self._overdue(scheduler)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._watchdog:
            self._watchdog.close()

    def _overdue(self, scheduler: Scheduler, line: str = "") -> StageError:
        """Return the error of a run without progress; `line` is that of the code that was interrupted."""
        tasks = (f"{task.stage} at step {task.step + 1}{_groups(task)}" for task in scheduler.running)
        waits, running = _waits(scheduler), f"running: {', '.join(dict.fromkeys(tasks)) or 'none'}"
        return StageError(
            Problem(
                where=line or self._of,
                what=f"no task finished in {self._deadline_s:g} s; {self._does or running}",
                why=f"every wait has a deadline{waits and f'; {waits}'}",
                fix="raise --deadline-s, or fix the stage that hangs",
            )
        )


def _stuck(of: str, phase: str, waited_s: float, line: str) -> StageError:
    return StageError(
        Problem(
            where=line or of,
            what=f"{phase}: not done within {waited_s:g} s",
            why="every wait has a deadline",
            fix="see what that line waits for, or raise --deadline-s",
        )
    )


def _waits(scheduler: Scheduler) -> str:
    """Return what the other stages of the earliest unfinished step wait for, for a message."""
    running = {(task.step, task.stage) for task in scheduler.running}
    waiting = list(scheduler.waiting())
    first = min((step for step, _, _ in waiting), default=0)
    return "; ".join(
        f"step {step + 1} {stage} waits for {', '.join(what) or 'a worker'}"
        for step, stage, what in waiting
        if step == first and (step, stage) not in running
    )


def _groups(task: Task) -> str:
    """Return a task's groups for a message: the first and the last."""
    if not task.groups:
        return ""
    first, last = task.groups[0], task.groups[-1]
    return f" (group {first})" if first == last else f" ({len(task.groups)} groups, {first} to {last})"
