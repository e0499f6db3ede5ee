"""A `Worker` as a Ray actor. A transfer's payload goes from actor to actor through Ray's object store and bypasses the
driver."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import ray
from ray import cloudpickle

from pipeline.data_plane.transfer_queue import TransferQueuePlane
from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.task import MeetingPlace, ServerAddress, Task
from pipeline.errors import SluiceError
from pipeline.executors import LOOPBACK
from pipeline.executors.interface import bind
from pipeline.executors.meetings import TransferEnd
from pipeline.executors.outputs import TaskResult
from pipeline.executors.worker import Worker, WorkerSettings
from pipeline.precedence import search_last
from pipeline.record.trace import Placed, Turned
from pipeline.rundir import RunDir

# Actor threads reserved for heartbeats and news, for the wait until a checkpoint is written, and for one until the end.
BEAT, DISK, LIFE = "beat", "disk", "life"


def write_into(log: Path) -> None:
    """Redirect the output of this process and its children into the run directory, if it is writable."""
    with suppress(OSError), log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


class Hosted:
    """Exposes a `Worker` to Ray calls."""

    def __init__(self, rank: int, hosted: bytes, stages: bytes, settings: WorkerSettings) -> None:
        bind(ray.util.get_node_ip_address())
        search_last(settings.folders)  # Ray puts the driver's working directory first, and knows no graph's folder
        group, mine = cloudpickle.loads(hosted)
        if settings.run_dir:
            write_into(RunDir(settings.run_dir).log(group.name, rank))
        self._worker = Worker(group, rank, mine, cloudpickle.loads(stages), settings)

    def meeting_point(self, deadline_s: float) -> tuple[str, int]:
        host = ray.util.get_node_ip_address()
        return host, self._worker.meeting_point(host, deadline_s)

    def join(self, meeting: tuple[str, int], deadline_s: float) -> None:
        self._worker.join(*meeting, deadline_s)

    def setup(self, joined: None = None) -> SluiceError | None:
        """Takes the result of `join` as an argument to run after it: an actor with streams does not keep call order."""
        return self._worker.setup()

    def connect(self, settings: Any) -> tuple[Placed, bool]:
        """Connect to the data plane. Returns where the worker runs, and whether it can be replaced."""
        self._worker.connect(TransferQueuePlane.attach(settings))
        node = ray.util.get_node_ip_address()
        placed = Placed(group=self._worker.group.name, worker=self._worker.rank, node=node, pid=os.getpid())
        return placed, self._worker.is_replaceable

    def _run(self, task: Task, meta: bytes | None, cleared: Sequence[str]) -> TaskResult:
        return self._worker.run(task, KVBatchMeta.decode(meta) if meta is not None else None, cleared)

    def home(self) -> tuple[str, list[str]]:
        """Return the node, and the GPUs assigned to this process."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "") if ray.get_gpu_ids() else ""
        return ray.get_runtime_context().get_node_id(), [gpu for gpu in gpus.split(",") if gpu]

    def turn(self, awake: bool, room: int | None) -> Turned:
        return self._worker.turn(awake, room)

    def send(self, task: Task, near: bool, meeting: MeetingPlace | None) -> tuple[Any, TaskResult]:
        end = TransferEnd("source", near, meeting)
        result = self._worker.transfer(task, end)
        return end.payloads[0] if end.payloads else None, result

    def carry(self, task: Task, near: bool, meeting: MeetingPlace, payloads: list[ray.ObjectRef]) -> TaskResult:
        """Called after `send` in a two-sided transfer."""
        return self._take("carrier", task, near, meeting, ray.get(payloads))

    def _take(
        self,
        side: Literal["carrier", "target"],
        task: Task,
        near: bool,
        meeting: MeetingPlace | None,
        payloads: list[Any],
    ) -> TaskResult:
        if any(payload is None for payload in payloads):  # a source failed; its own result has the reason
            return TaskResult(task=task)
        return self._worker.transfer(task, TransferEnd(side, near, meeting, payloads))

    def hold(self, folder: Path) -> None:
        self._worker.hold(folder)

    @ray.method(concurrency_group=DISK, enable_task_events=False)
    def saved(self) -> None:
        """Wait for the disk, whatever the current task does."""
        self._worker.saved()

    @ray.method(concurrency_group=DISK, enable_task_events=False)
    def files(self, folder: Path) -> dict[str, int]:
        return self._worker.files(folder)

    def saved_bytes(self) -> int:
        return self._worker.saved_bytes()

    def restore(self, folder: Path) -> None:
        self._worker.restore(folder)

    @ray.method(concurrency_group=BEAT, enable_task_events=False)
    def beat(self) -> None:
        """Answer a heartbeat, whatever the current task does."""

    @ray.method(concurrency_group=BEAT, enable_task_events=False)
    def found(self, servers: Mapping[str, Sequence[ServerAddress]]) -> None:
        """Hear where stages of this worker are served, whatever the current task does."""
        self._worker.found(servers)


@ray.remote(concurrency_groups={BEAT: 1, DISK: 1})  # type: ignore[call-overload]
class Actor(Hosted):
    """A worker that runs one task at a time."""

    def run(self, task: Task, meta: bytes | None, cleared: Sequence[str]) -> TaskResult:
        return self._run(task, meta, cleared)

    def receive(
        self, task: Task, near: bool, meeting: MeetingPlace | None, payloads: list[ray.ObjectRef]
    ) -> TaskResult:
        taken = ray.get(payloads)  # a call that Ray queues for them would delay heartbeats
        return self._take("target", task, near, meeting, taken)


@ray.remote(concurrency_groups={BEAT: 1, DISK: 1})  # type: ignore[call-overload]
class StreamActor(Hosted):
    """A worker whose streams share one event loop; weights are swapped in that loop too, between two tokens.

    Other tasks run in a separate thread, one at a time, so a slow reward does not stall decoding.
    """

    def __init__(self, rank: int, hosted: bytes, stages: bytes, settings: WorkerSettings) -> None:
        super().__init__(rank, hosted, stages, settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasks")

    async def run(self, task: Task, meta: bytes | None, cleared: Sequence[str]) -> TaskResult:
        if self._worker.ranks.connected:  # ranks meet in task order, stream tasks included
            return self._run(task, meta, cleared)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, task, meta, cleared)

    async def stream(self, task: Task, meta: bytes | None, cleared: Sequence[str]) -> AsyncIterator[TaskResult]:
        handle = KVBatchMeta.decode(meta) if meta is not None else None
        async for report in self._worker.stream(task, handle, cleared):
            yield report

    async def receive(
        self, task: Task, near: bool, meeting: MeetingPlace | None, payloads: list[ray.ObjectRef]
    ) -> TaskResult:
        return self._take("target", task, near, meeting, await asyncio.gather(*payloads))

    def cancel(self, groups: Sequence[int]) -> None:
        self._worker.cancel(groups)


@ray.remote(concurrency_groups={BEAT: 1, DISK: 1, LIFE: 1})  # type: ignore[call-overload]
class ServingActor(Hosted):
    """A worker that serves the workers of other groups, and runs no task."""

    def serve(self, near: bool) -> dict[str, ServerAddress]:
        """Listen for them, which are all on this machine if `near`. Returns where, by stage."""
        return self._worker.serve(LOOPBACK if near else ray.util.get_node_ip_address())

    @ray.method(concurrency_group=LIFE, enable_task_events=False)
    def live(self) -> None:
        """Return never: the call fails when this process ends."""
        threading.Event().wait()
