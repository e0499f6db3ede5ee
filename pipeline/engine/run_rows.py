"""The driver's view of a run's columns: their handles, and their removal after the last reader.

Rows are removed in a separate thread, so that the driver does not wait, unless the plan limits the bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.declare.handle import KVBatchMeta, groups_of
from pipeline.declare.task import Task
from pipeline.engine.handles import HandleTable
from pipeline.engine.journal import Journal
from pipeline.engine.stored import Stored
from pipeline.executors import Executor
from pipeline.executors.outputs import TaskResult
from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.schedule.events import Clear, Event, Landed

CLEARS_AT_ONCE = 2  # removals that are not waited for: they bound the rows beyond the plan's capacity


class RunRows:
    """The rows of one run in the executor's data plane. `tokens` is the ragged dimension of responses."""

    def __init__(self, plan: Plan, executor: Executor, journal: Journal, tokens: str | None) -> None:
        self.handles = HandleTable(plan.group_size)
        self._plan, self._executor, self._journal, self._tokens = plan, executor, journal, tokens
        self._stages = {stage.name: stage for stage in plan.stages}
        self._fields = {partition.name: partition.fields for partition in plan.partitions}
        self.stored = Stored(self._fields)
        self._clearing = ThreadPoolExecutor(1, thread_name_prefix="clear")
        self._clears: deque[Future[trace.Cleared]] = deque()
        self._at_once = CLEARS_AT_ONCE if plan.capacity_bytes is None else 0

    def handle(self, task: Task) -> KVBatchMeta | None:
        """Return the handle of a task's inputs; None if it reads no samples."""
        planned = self._stages[task.stage]
        fields = [field for field in planned.reads if field not in self._plan.weights_fields]
        groups = task.groups if planned.chooses else task.groups[: planned.first_groups]
        return self.handles.handle(groups, fields) if fields and groups else None

    def landed(self, report: TaskResult) -> list[Event]:
        """Return an event for each field that a report's puts have made present."""
        task, events = report.task, list[Event]()
        for handle, sizes in zip(report.handles, report.sizes, strict=True):
            whole = self.handles.add(handle)
            self.stored.add(tuple(groups_of(handle.keys)), sizes)
            oldest = tuple(report.oldest[group] for group in whole) if report.oldest else ()
            most_bytes = tuple(self.stored.largest(field, whole) for field in handle.fields)
            events.append(Landed(task.step, whole, handle.fields, oldest, task.number, most_bytes))
        return events

    def lengths(self, groups: Sequence[int]) -> tuple[int, ...]:
        """Return the longest response of each group, in tokens; empty unless all are known."""
        return self.handles.longest(groups, self._tokens) if self._tokens else ()

    def lost(self, groups: Sequence[int], attempt: int) -> None:
        """Record that the worker of an attempt was lost."""
        self.handles.lose(groups, attempt)

    def clear(self, decision: Clear) -> None:
        """Clear partitions of groups that have no remaining reader."""
        fields = [field for name in decision.partitions for field in self._fields[name]]
        handle = self.handles.rows(decision.groups, fields) if fields or not self._fields else None
        stored = handle is not None or (decision.last and self.handles.rows(decision.groups) is not None)
        if decision.last:
            self.handles.forget(decision.groups)
        if stored:
            self._remove(handle, decision)

    def sweep(self, report: TaskResult) -> None:
        """Remove the rows put by a replaced attempt."""
        for handle in report.handles:
            self._remove(handle, Clear(report.task.step, (), (), last=False))

    def settle(self, *, wait: bool = False) -> None:
        """Record the removals that are done, or with `wait` all of them. Raises the error of a failed one."""
        while self._clears and (wait or self._clears[0].done()):
            self._cleared(self._clears.popleft())

    def left(self) -> int:
        """Return the number of rows left when nothing is in flight, after clearing late rows of lost workers."""
        plane, partition = self._executor.plane, self._plan.partition
        late = self.handles.late(partition)
        if late is not None:
            plane.clear(late)
        return plane.row_count(partition)

    def close(self) -> None:
        """Wait for pending removals; no more may follow. Idempotent."""
        self._clearing.shutdown()

    def _remove(self, handle: KVBatchMeta | None, decision: Clear) -> None:
        """Remove the rows of a handle, if there are any, and record it."""

        def clear() -> trace.Cleared:
            start_s = time.monotonic()
            if handle is not None:
                self._executor.plane.clear(handle)
            return trace.Cleared(
                step=decision.step,
                groups=decision.groups,
                partitions=decision.partitions,
                last=decision.last,
                start_s=start_s,
                end_s=time.monotonic(),
            )

        self._clears.append(self._clearing.submit(clear))
        while len(self._clears) > self._at_once:
            self._cleared(self._clears.popleft())
        if handle is not None and (decision.last or not decision.groups):
            self._executor.cleared(list({row: None for placement in handle.placements for row in placement.rows}))

    def _cleared(self, removal: Future[trace.Cleared]) -> None:
        done = removal.result()
        self._journal.write(done)
        self.stored.clear(done.groups, done.partitions)
