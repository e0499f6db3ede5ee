"""Where a run's columns lie, as the driver sees it: handles on them, and their removal once nobody reads them.

Rows are removed in a thread of its own: nobody waits for that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.task import Task
from pipeline.engine.handles import HandleTable
from pipeline.engine.journal import Journal
from pipeline.executors import Executor
from pipeline.executors.worker import TaskResult
from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.schedule.events import Event, Landed

CLEARS_AT_ONCE = 2


class Rows:
    """The rows of one run in the executor's data plane. `tokens` is the dimension in which responses are long."""

    def __init__(self, plan: Plan, executor: Executor, journal: Journal, tokens: str | None) -> None:
        self.handles = HandleTable(plan.group_size)
        self._plan, self._executor, self._journal, self._tokens = plan, executor, journal, tokens
        self._stages = {stage.name: stage for stage in plan.stages}
        self._clearing = ThreadPoolExecutor(1, thread_name_prefix="clear")
        self._clears: deque[Future[trace.Cleared]] = deque()

    def handle(self, task: Task) -> KVBatchMeta | None:
        """What a task reads; None where it reads no samples."""
        planned = self._stages[task.stage]
        fields = [field for field in planned.reads if field not in self._plan.weights_fields]
        groups = task.groups if planned.chooses else task.groups[: planned.first_groups]
        return self.handles.handle(groups, fields) if fields and groups else None

    def landed(self, report: TaskResult) -> list[Event]:
        """What is present now that a task has put what it reports."""
        task, events = report.task, list[Event]()
        for handle in report.handles:
            whole = self.handles.add(handle)
            oldest = tuple(report.oldest[group] for group in whole) if report.oldest else ()
            events.append(Landed(task.step, whole, handle.fields, oldest, task.number))
        return events

    def lengths(self, groups: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the longest response of each group; empty where that is not known of all of them."""
        return self.handles.longest(groups, self._tokens) if self._tokens else ()

    def lost(self, groups: Sequence[int], attempt: int) -> None:
        """The worker of an attempt is lost."""
        self.handles.lose(groups, attempt)

    def clear(self, step: int, groups: tuple[int, ...]) -> None:
        """Nobody will read these groups again."""
        handle = self.handles.rows(groups)
        self.handles.forget(groups)
        if handle is not None:
            self._remove(handle, step, groups)

    def sweep(self, report: TaskResult) -> None:
        """Remove what an attempt has put that was replaced."""
        for handle in report.handles:
            self._remove(handle, report.task.step, ())

    def settle(self, *, wait: bool = False) -> None:
        """Record the removals that are done; raises what one of them raised."""
        while self._clears and (wait or self._clears[0].done()):
            self._journal.write(self._clears.popleft().result())

    def left(self) -> int:
        """The rows that are there once nothing is in flight: what a worker that was taken for lost has put since."""
        plane, partition = self._executor.plane, self._plan.partition
        late = self.handles.late(partition)
        if late is not None:
            plane.clear(late)
        return plane.row_count(partition)

    def close(self) -> None:
        """Wait for what is being removed. Idempotent."""
        self._clearing.shutdown()

    def _remove(self, handle: KVBatchMeta, step: int, groups: tuple[int, ...]) -> None:
        def clear() -> trace.Cleared:
            start_s = time.monotonic()
            self._executor.plane.clear(handle)
            return trace.Cleared(step=step, groups=groups, start_s=start_s, end_s=time.monotonic())

        while len(self._clears) >= CLEARS_AT_ONCE:  # the data plane holds no more than the plan says and these
            self._journal.write(self._clears.popleft().result())
        self._clears.append(self._clearing.submit(clear))
        self._executor.cleared(list({row: None for placement in handle.placements for row in placement.rows}))
