"""Runs a graph in this process: one worker per worker group, one task at a time, columns in memory.

A group with several workers becomes one worker with the whole batch, which gives the same gradients up to rounding;
only a group that serves others has all of its workers.
Tasks run in submission order; streams advance when no other task is queued and interleave at their awaits.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from pipeline.data_plane import DataPlane
from pipeline.data_plane.memory import MemoryPlane
from pipeline.declare.backend import PLAIN
from pipeline.declare.graph import Graph
from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.stage import Stage
from pipeline.declare.task import MeetingPlace, Task
from pipeline.errors import GraphError, PeerLost
from pipeline.executors import LOOPBACK, by_stage, shards
from pipeline.executors.meetings import Meetings, TransferEnd
from pipeline.executors.outputs import TaskResult
from pipeline.executors.turns import Turns
from pipeline.executors.worker import Worker, WorkerSettings
from pipeline.plan.group_checks import one_process_problems
from pipeline.plan.plan import PlacedGroup, Plan, PlannedStage
from pipeline.plan.planner import placed_groups, with_samples
from pipeline.record.trace import Placed
from pipeline.rundir import RunDir
from pipeline.screen import aside

MEETING_DEADLINE_S = 900.0  # of the two sides of a transfer
LINGER_S = 0.2  # a stream reports when it ends or awaits; nothing else could run while it computes


class LocalExecutor:
    """The in-process executor. `on_start` is called with what each part of a start waits for."""

    name = "local"
    can_restart = True

    def __init__(self, *, on_start: Callable[[str], None] = lambda doing: None) -> None:
        self._on_start = on_start
        self.plane: DataPlane = MemoryPlane()
        self._queue: deque[tuple[Task, KVBatchMeta | None]] = deque()
        self._loop = asyncio.new_event_loop()
        self._streams: set[asyncio.Task[None]] = set()
        self._reports: list[TaskResult] = []
        self._came = asyncio.Event()
        self._workers: dict[str, Worker] = {}
        self._servers: list[Worker] = []  # that serve stages, and run none
        self._planned: dict[str, PlannedStage] = {}
        self._stages: dict[str, Stage] = {}
        self._meetings = Meetings(lambda: LOOPBACK, deadline_s=MEETING_DEADLINE_S)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carrier")

    def start(self, graph: Graph, plan: Plan, settings: WorkerSettings, restore: Path | None) -> list[Placed]:
        stages = with_samples(graph)
        by_name = self._stages = {stage.name: stage for stage in stages}
        self._planned = {stage.name: stage for stage in plan.stages}
        self._turns = Turns(plan, lambda name, awake, room: [self._workers[name].turn(awake, room)])
        groups = {group.name: group for group in placed_groups(stages, graph.host)}
        if problems := tuple(one_process_problems(groups.values())):
            raise GraphError(*problems)
        for placed in plan.groups:
            self._on_start(plan.loading([placed.name]))
            hosted = [by_name[name] for name in placed.stages]
            worker = self._workers[placed.name] = Worker(groups[placed.name], 0, hosted, stages, settings)
            with self._aside(placed, settings):
                error = worker.setup()
            if error:
                raise error
            worker.connect(self.plane)
            if restore:
                worker.restore(restore)
        for placed in plan.servers:
            self._servers += [Worker(groups[placed.name], rank, (), stages, settings) for rank in range(placed.workers)]
        servers = by_stage(server.serve(LOOPBACK) for server in self._servers)
        for worker in self._workers.values():
            worker.found(servers)
        self._on_start("the first step")
        return [
            Placed(group=worker.group.name, worker=worker.rank, node="this process", pid=os.getpid())
            for worker in (*self._workers.values(), *self._servers)
        ]

    def _aside(self, placed: PlacedGroup, settings: WorkerSettings) -> AbstractContextManager[None]:
        """Keep what engines print while they load off the screen; not what plain functions do, which are the user's."""
        if settings.run_dir is None or placed.backend == PLAIN.name:
            return nullcontext()
        return aside(RunDir(settings.run_dir).log(placed.name, 0))

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        self._turns.before(self._planned[task.stage])
        if self._planned[task.stage].shape == "stream":
            self._streams.add(self._loop.create_task(self._stream(task, meta)))
        else:
            self._queue.append((task, meta))

    def wait(self, timeout_s: float) -> list[TaskResult]:
        if self._queue:
            result = self._run(*self._queue.popleft())
            result.events[:0] = self._turns.taken()
            return [result]
        if self._streams:
            self._loop.run_until_complete(self._report(timeout_s))
            reports, self._reports = self._reports, []
            return reports
        time.sleep(min(timeout_s, 0.05))  # only a process outside the graph can make progress now
        return []

    def cancel(self, task: Task, groups: Sequence[int]) -> None:
        self._workers[self._planned[task.stage].groups[0]].cancel(groups)

    async def _stream(self, task: Task, meta: KVBatchMeta | None) -> None:
        worker = self._workers[self._planned[task.stage].groups[0]]
        async for report in worker.stream(task, meta, linger_s=LINGER_S):
            self._reports.append(report)
            self._came.set()

    async def _report(self, timeout_s: float) -> None:
        """Advance the streams until one has something to report."""
        self._came.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._came.wait(), timeout_s)
        for stream in [stream for stream in self._streams if stream.done()]:
            self._streams.discard(stream)
            stream.result()

    def _run(self, task: Task, meta: KVBatchMeta | None) -> TaskResult:
        stage = self._planned[task.stage]
        if stage.shape != "transfer":
            if stage.sharding and meta is not None:
                (meta,) = shards(stage, task, meta, replicas=1)
            return self._workers[stage.groups[0]].run(task, meta)
        return self._transfer(task, *stage.groups)

    def _transfer(self, task: Task, source: str, target: str) -> TaskResult:
        """Run both sides in sequence, or a two-sided transfer concurrently with one side in a thread."""
        meeting: MeetingPlace | None = None
        if self._stages[task.stage].meets(True):
            meeting = self._meetings.of(task.stage, [f"{source}.0"], target, [0])
        offer = TransferEnd("source", True, meeting)
        sent = self._workers[source].transfer(task, offer)
        if sent.error:
            return sent
        taking, carried = TransferEnd("target", True, meeting, offer.payloads), TaskResult(task=task)
        if meeting is None:
            received = self._workers[target].transfer(task, taking)
        else:
            carrying = self._thread.submit(
                self._carry, source, task, TransferEnd("carrier", True, meeting, offer.payloads)
            )
            received = self._workers[target].transfer(task, taking)
            if received.error:
                self._meetings.end(meeting.name, str(received.error))
            carried = carrying.result()
            if carried.error and (not received.error or isinstance(received.error, PeerLost)):
                received.error = carried.error
        received.events[:0] = [*sent.events, *carried.events]
        received.metrics = sent.metrics | carried.metrics | received.metrics
        return received

    def _carry(self, source: str, task: Task, end: TransferEnd) -> TaskResult:
        carried = self._workers[source].transfer(task, end)
        if carried.error and end.meeting:
            self._meetings.end(end.meeting.name, str(carried.error))
        return carried

    def hold(self, folder: Path) -> None:
        for worker in self._workers.values():
            worker.hold(folder)

    def saved(self, folder: Path) -> dict[str, dict[str, int]]:
        for worker in self._workers.values():
            worker.saved()
        return {name: worker.files(folder) for name, worker in self._workers.items()}

    def saved_bytes(self) -> int:
        return sum(worker.saved_bytes() for worker in self._workers.values())

    def cleared(self, rows: Sequence[str]) -> None:
        return None  # the store is in this process; no second cache

    def close(self) -> None:
        self._queue.clear()
        if not self._loop.is_closed():
            for stream in self._streams:
                stream.cancel()
            if self._streams:
                self._loop.run_until_complete(asyncio.wait(self._streams))
            self._streams.clear()
            self._loop.close()
        self._thread.shutdown()
        self._meetings.close()
        self.plane.drain()
        for worker in (*self._workers.values(), *self._servers):
            worker.close()
        self.plane.close()
