"""Assigns free workers to stages that can start. Pure.

A worker group has data-parallel replicas. A replica runs one task at a time, plus any number of streams, which mostly
wait or decode in one batch with each other. A transfer needs every replica of both its groups. While it runs, no stream
starts until one replica has the new weights; from then on streams are assigned to replicas as usual, and each starts
once its own replica has them. With refit="drain", a waiting transfer holds back new streams until the running ones have
ended. Groups on the same GPUs take turns. Stages that weights depend on get workers first; among those the earlier
step, then the longer path to the weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import msgspec

from pipeline.declare.task import Task
from pipeline.plan.plan import PlacedGroup, Plan
from pipeline.schedule.readiness import Reader, Unit


class GroupWorkers:
    """The state of one worker group."""

    def __init__(self, group: PlacedGroup) -> None:
        self.name = group.name
        self.replicas = group.replicas
        self.held = False  # no stream may start: a transfer runs, or waits for streams to end
        self.partners: list[GroupWorkers] = []  # groups on the same GPUs; only one of them runs at a time
        self.streams = 0
        self.taking = False  # a transfer to this group runs
        self.late: set[int] = set()  # replicas that must receive a transfer before they stream again
        self._waiting: dict[int, list[Task]] = {}  # late replica -> streams that wait for it
        self._free = list(range(group.replicas))  # a heap
        self._load = [(0, replica) for replica in range(group.replicas)]  # a heap of (groups being streamed, replica)
        self._streaming = [0] * group.replicas

    @property
    def idle(self) -> bool:
        """Whether no replica runs a task; streams are not counted."""
        return len(self._free) == self.replicas

    @property
    def busy(self) -> bool:
        """Whether any task or stream runs."""
        return self.streams > 0 or not self.idle

    @property
    def closed(self) -> bool:
        """Whether no stream may start: a transfer waits for streams to end, or has reached no replica yet."""
        return self.held and (not self.taking or len(self.late) == self.replicas)

    @property
    def running_streams(self) -> int:
        """The number of streams that do not wait for their replica."""
        return self.streams - sum(map(len, self._waiting.values()))

    def start(self, task: Task) -> list[Task]:
        """Start a stream, or queue it if its replica must first receive a transfer. Returns what starts."""
        assert task.replica is not None
        if task.replica not in self.late:
            return [task]
        self._waiting.setdefault(task.replica, []).append(task)
        return []

    def take_transfer(self) -> None:
        """Begin a transfer to every replica."""
        self.held = self.taking = True
        self.late = set(range(self.replicas))

    def reached(self, replica: int) -> list[Task]:
        """Record that a replica has received a transfer. Returns the streams that waited for it."""
        self.late.discard(replica)
        return self._waiting.pop(replica, [])

    def end_transfer(self, *, again: bool) -> None:
        """End a transfer. With `again` it was lost after its version was published: all replicas wait for the next."""
        self.held = self.taking = False
        self.late = set(range(self.replicas)) if again else set()

    @property
    def free(self) -> int:
        """The number of replicas that run no task."""
        return len(self._free)

    def is_free(self, replica: int) -> bool:
        """Return whether this replica runs no task."""
        return replica in self._free

    def take(self, replica: int | None = None) -> int:
        """Occupy the given replica, or the first free one. Returns it."""
        if replica is None:
            return heapq.heappop(self._free)
        self._free.remove(replica)
        heapq.heapify(self._free)
        return replica

    def take_all(self) -> None:
        """Occupy every replica. All must be free."""
        self._free.clear()

    def release(self, replica: int | None) -> None:
        """Free the replica of a finished task; None frees all."""
        for one in [replica] if replica is not None else range(self.replicas):
            heapq.heappush(self._free, one)

    def stream_on(self, groups: int) -> int:
        """Assign a stream of `groups` groups to the replica that streams the fewest. Returns the replica."""
        while True:
            load, replica = heapq.heappop(self._load)
            if load == self._streaming[replica]:
                break
        self._stream(replica, groups)
        self.streams += 1
        return replica

    def streamed(self, replica: int, groups: int, *, over: bool) -> None:
        """Record that `groups` groups of a stream on this replica have ended, and if `over` the stream itself."""
        self._stream(replica, -groups)
        self.streams -= over

    def _stream(self, replica: int, groups: int) -> None:
        self._streaming[replica] += groups
        if len(self._load) < 4 * self.replicas + 64:
            heapq.heappush(self._load, (self._streaming[replica], replica))
        else:  # most entries are outdated, and those with large loads would never be popped
            self._load = [(load, one) for one, load in enumerate(self._streaming)]
            heapq.heapify(self._load)


class RunningTask:
    """A running task and its unacknowledged groups."""

    __slots__ = ("left", "reader", "task")

    def __init__(self, task: Task, reader: Reader) -> None:
        self.task, self.reader = task, reader
        self.left = dict.fromkeys(task.groups)


class Grants:
    """Matches stages that can start with workers.

    `version` returns the published policy version. `can_wait` returns whether a stage that no weights depend on may be
    delayed while a stream runs.
    """

    def __init__(self, plan: Plan, *, version: Callable[[], int], can_wait: Callable[[Reader], bool]) -> None:
        self._version, self._can_wait = version, can_wait
        self._drains = plan.refit == "drain"
        self._workers = {group.name: GroupWorkers(group) for group in plan.groups}
        self._feeds = {name: {name} for name in self._workers}  # group -> groups whose offers depend on its state
        for stage in plan.stages:
            if stage.shape == "transfer":
                self._feeds[stage.groups[-1]].add(stage.groups[0])
        for name, workers in self._workers.items():
            workers.partners = [self._workers[partner] for partner in plan.partners(name)]
            self._feeds[name].update(plan.partners(name))
        self._offers: dict[str, dict[int, Reader]] = {name: {} for name in self._workers}
        self._dirty: set[str] = set()  # worker groups to reconsider
        self._running: dict[int, RunningTask] = {}
        self._numbers = 0
        self._reached: list[Task] = []  # streams whose replicas have received their transfer

    @property
    def idle(self) -> bool:
        """Whether no task runs."""
        return not self._running

    @property
    def tasks(self) -> list[Task]:
        """The running tasks, in order of submission."""
        return [running.task for running in self._running.values()]

    def running(self, number: int | None) -> RunningTask | None:
        """Return the running task of this number; None if it has ended or was replaced."""
        return self._running.get(number) if number is not None else None

    def streams(self) -> Iterable[RunningTask]:
        """Return the running streams."""
        return [running for running in self._running.values() if running.reader.stage.shape == "stream"]

    def offer(self, reader: Reader) -> None:
        """Offer work of a stage, if it can start."""
        if reader.units and not reader.blockers:
            group = reader.stage.groups[0]
            self._offers[group][id(reader)] = reader
            self._dirty.add(group)

    def look_again(self) -> None:
        """Reconsider every worker group, after a change that any stage may have waited for."""
        self._dirty.update(self._workers)

    def acknowledge(self, running: RunningTask, groups: Sequence[int]) -> None:
        """Acknowledge groups of a task. Once none are left, the task ends and frees its workers."""
        for group in groups:
            del running.left[group]
        if running.reader.stage.shape == "transfer":
            for replica in sorted(self._workers[running.reader.stage.groups[-1]].late):
                self.reach(running, replica)
        self._free(running, len(groups))

    def reach(self, transfer: RunningTask, replica: int) -> None:
        """Record that a replica of a transfer's target has received it."""
        target = self._workers[transfer.reader.stage.groups[-1]]
        self._reached += target.reached(replica)
        self._dirty.add(target.name)

    def lose(self, running: RunningTask) -> Unit:
        """End a lost attempt. Returns its unacknowledged groups."""
        left = tuple(running.left)
        running.left.clear()
        task, workers = running.task, self._workers[running.reader.stage.groups[0]]
        if running.reader.stage.shape == "stream" and workers.taking and task.replica is not None:
            workers.late.add(task.replica)  # its replacement has the previous version
        self._free(running, len(left), lost=True)
        return left

    def granted(self) -> list[Task]:
        """Return the tasks that start now."""
        tasks, self._reached = [self._dated(task) for task in self._reached], []
        while self._dirty:
            dirty = [name for name in self._workers if name in self._dirty]
            self._dirty.clear()
            for name in dirty:
                self._grant(self._workers[name], tasks)
        return tasks

    def _dated(self, task: Task) -> Task:
        """Return a stream that has waited for its replica, with the current step and version."""
        running = self._running[task.number]
        step, version = running.reader.step, max(self._version(), 0)
        running.task = msgspec.structs.replace(task, step=step, version=version)
        return running.task

    def _free(self, running: RunningTask, groups: int, *, lost: bool = False) -> None:
        task, stage = running.task, running.reader.stage
        over = not running.left
        if stage.shape == "stream":
            assert task.replica is not None
            self._workers[stage.groups[0]].streamed(task.replica, groups, over=over)
        if not over:
            return
        del self._running[task.number]
        if stage.shape == "transfer":
            self._workers[stage.groups[-1]].end_transfer(again=lost and self._version() > task.step)
        for name in dict.fromkeys(stage.groups):
            if stage.shape != "stream":
                self._workers[name].release(task.replica)
            self._dirty |= self._feeds[name]

    def _grant(self, workers: GroupWorkers, tasks: list[Task]) -> None:
        offers = self._offers[workers.name]
        if not offers or (workers.partners and any(partner.busy for partner in workers.partners)):
            return
        reserved = False  # free replicas are kept for a task that needs all of them
        found = [*offers.items()]
        if len(found) > 1:
            found.sort(key=lambda item: item[1].order)
        for key, reader in found:
            if reader.units and not reader.blockers:  # a checkpoint may have blocked it since
                if reader.stage.shape == "stream":
                    self._start_stream(workers, reader, tasks)
                elif not reserved:
                    reserved = self._start(workers, reader, tasks)
            if not reader.units:
                del offers[key]

    def _start(self, workers: GroupWorkers, reader: Reader, tasks: list[Task]) -> bool:
        """Start what can start. Returns whether the remaining free workers are reserved for this stage."""
        if reader.stage.shape == "transfer":
            return self._start_transfer(workers, reader, tasks)
        if workers.late:
            return False  # a lost transfer comes again: its version is published, and some replica lacks it
        if not reader.stage.path and workers.streams and self._can_wait(reader):
            return False
        if reader.stage.sharding is not None:
            return self._start_on_all(workers, reader, tasks)
        whole = reader.stage.per == "batch"
        while reader.units and (workers.is_free(0) if whole else workers.free):
            unit, attempt = reader.take()
            for groups in [unit] if whole or not unit else divided(unit, workers.free):
                self._run(reader, groups, workers.take(0 if whole else None), attempt, tasks)
        return False

    def _start_stream(self, workers: GroupWorkers, reader: Reader, tasks: list[Task]) -> None:
        while not workers.closed and reader.units:
            unit, attempt = reader.take()
            for groups in divided(unit, workers.replicas):
                self._run(reader, groups, workers.stream_on(len(groups)), attempt, tasks)

    def _start_on_all(self, workers: GroupWorkers, reader: Reader, tasks: list[Task]) -> bool:
        if workers.idle:
            unit, attempt = reader.take()
            workers.take_all()
            self._run(reader, unit, None, attempt, tasks)
        return True

    def _start_transfer(self, workers: GroupWorkers, reader: Reader, tasks: list[Task]) -> bool:
        target = self._workers[reader.stage.groups[-1]]
        target.held = self._drains
        if any(partner.busy for partner in target.partners if partner is not workers):
            return target is workers
        if (target.held and target.running_streams) or not target.idle:
            return target is workers
        if workers.idle:
            unit, attempt = reader.take()
            for one in dict.fromkeys((workers, target)):
                one.take_all()
            target.take_transfer()
            self._run(reader, unit, None, attempt, tasks)
        return True

    def _run(self, reader: Reader, groups: Unit, replica: int | None, attempt: int, tasks: list[Task]) -> None:
        self._numbers += 1
        task = Task(
            stage=reader.stage.name,
            step=reader.step,
            groups=groups,
            attempt=attempt,
            version=max(self._version(), 0),
            number=self._numbers,
            replica=replica,
        )
        self._running[task.number] = RunningTask(task, reader)
        tasks += self._workers[reader.stage.groups[0]].start(task) if reader.stage.shape == "stream" else [task]


def divided(groups: Sequence[int], parts: int) -> list[Unit]:
    """Divide groups, in order and as evenly as possible, into at most `parts` parts."""
    parts = max(1, min(parts, len(groups)))
    edges = [len(groups) * i // parts for i in range(parts + 1)]
    return [tuple(groups[start:stop]) for start, stop in pairwise(edges)]
