"""Runs a graph on Ray actors: one actor a worker, columns in TransferQueue. The only module that imports ray.

Without an address it starts a Ray of its own on a loopback address, with token authentication, and ends it. With an
address it joins a running cluster. Worker groups are placed by placement groups; the graph's own code travels with the
tasks, so no file of the user needs to exist on another node.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

# Ray reads these once, while it is imported. Who imported Ray before us has chosen already.
if "ray" not in sys.modules and os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pipeline.data_plane.transfer_queue import TransferQueuePlane, environment
from pipeline.errors import DataPlaneLost, GraphError, Problem, SluiceError, StageError, WorkerLost
from pipeline.executors import merged, shards
from pipeline.graph import HOST, Graph, WorkerGroup
from pipeline.meta import KVBatchMeta
from pipeline.plan import PlacedGroup, Plan, PlannedStage, with_samples, worker_groups
from pipeline.ranks import Layout
from pipeline.stage import Task
from pipeline.trace import Placed
from pipeline.worker import TaskResult, Worker, WorkerSettings

START_DEADLINE_S = 300.0  # to place and set up all workers; models are loaded in it
RESTARTS = 8  # of workers of one group in a run
EXCHANGE_DEADLINE_S = 900.0  # among the ranks of a group; a rank that fails ends the run at once
LOOPBACK = "127.0.0.2"  # Ray replaces 127.0.0.1 by the address of the network card; this one it keeps
SPINS = "2000"  # of a thread that waits for others of its process: workers share cores, and spinning takes them away
DATA_PLANE_CPUS = 2  # TransferQueue's controller and its storage unit ask for one each


class RayExecutor:
    """The executor of actors.

    `modules` are the user's own modules, shipped by value; `address` joins a cluster; `trusted_network` lets the data
    plane listen on other addresses than loopback, which a cluster of several machines needs.
    """

    name = "ray"

    def __init__(
        self, *, address: str | None = None, modules: Sequence[ModuleType] = (), trusted_network: bool = False
    ) -> None:
        self._address, self._modules, self._trusted_network = address, modules, trusted_network
        self.plane: Any = None
        self._owns_ray = False
        self._actors: dict[str, list[Any]] = {}
        self._births: dict[str, Callable[[int], Any]] = {}  # by worker group: starts its actor of a rank
        self._replaceable: dict[str, bool] = {}
        self._restarts: Counter[str] = Counter()
        self._retired: dict[Any, tuple[str, int]] = {}  # actors that died and were replaced
        self._served: dict[tuple[str, str], tuple[Task, ray.ObjectRef]] = {}  # what a group received last, by stage
        self._placement_groups: list[Any] = []
        self._planned: dict[str, PlannedStage] = {}
        self._layouts: dict[str, Layout] = {}
        self._pending: dict[ray.ObjectRef, _Running] = {}
        self._streams: dict[Any, _Stream] = {}  # by its reports
        self._cleared: dict[str, list[str]] = {}

    def start(self, graph: Graph, plan: Plan, settings: WorkerSettings, restore: Path | None) -> list[Placed]:
        os.environ.update({key: value for key, value in environment().items() if key not in os.environ})
        self._connect(plan)
        self._planned = {stage.name: stage for stage in plan.stages}
        stages = with_samples(graph)
        by_name = {stage.name: stage for stage in stages}
        groups = {group.name: group for group in worker_groups(stages, graph.host)}
        for module in self._modules:
            cloudpickle.register_pickle_by_value(module)
        blob_of_all = cloudpickle.dumps(tuple(stages))
        setups: list[ray.ObjectRef] = []
        joins: list[ray.ObjectRef] = []
        for placed in sorted(plan.groups, key=lambda group: group.name != HOST):  # the host group has one node only
            hosted = cloudpickle.dumps((groups[placed.name], tuple(by_name[name] for name in placed.stages)))
            streams = any(self._planned[name].shape == "stream" for name in placed.stages)
            actor: Any = _StreamActor if streams else _Actor
            birth = self._births[placed.name] = self._place(groups[placed.name], actor, hosted, blob_of_all, settings)
            actors = self._actors[placed.name] = [birth(rank) for rank in range(placed.workers)]
            self._layouts[placed.name] = Layout.of(groups[placed.name])
            if self._ranks_meet(placed, plan.stages):
                meeting = actors[0].meeting_point.remote(START_DEADLINE_S)
                joins += [actor.join.remote(meeting, EXCHANGE_DEADLINE_S) for actor in actors]
            setups += [actor.setup.remote() for actor in actors]
        here = f"node:{ray.util.get_node_ip_address()}"  # a resource that only this node has
        self.plane = TransferQueuePlane.create(  # while the models load
            trusted_network=self._trusted_network, storage_resource=here
        )
        actors = [actor for group in self._actors.values() for actor in group]
        self._get_all(joins, "meet the other ranks of their group")
        self._get_all(setups, "set up")
        joined = self._get_all([actor.connect.remote(self.plane.settings) for actor in actors], "join the data plane")
        for placed_at, replaceable in joined:
            self._replaceable[placed_at.group] = replaceable
        if restore:
            self._get_all([actor.restore.remote(restore) for actor in actors], f"restore {restore.name}")
        return [placed_at for placed_at, _ in joined]

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        stage = self._planned[task.stage]
        if stage.shape == "transfer":
            source, target = stage.groups
            sends = [actor.send.options(num_returns=2).remote(task) for actor in self._actors[source]]
            payload = sends[0][0]
            received = [(actor.receive.remote(task, payload), actor) for actor in self._actors[target]]
            sent = [(ref, actor) for (_, ref), actor in zip(sends, self._actors[source])]
            self._follow(_Running(task, leading=dict(received), others=dict(sent), payload=payload))
            return
        name = stage.groups[0]
        layout = self._layouts[name]
        if stage.shape == "stream":
            assert task.replica is not None
            handle = meta.encode() if meta is not None else None
            leader, *_ = siblings = layout.siblings(task.replica)
            for rank in siblings:
                actor = self._actors[name][rank]
                stream = actor.stream.options(num_returns="streaming")
                reports = stream.remote(task, handle, self._cleared.pop(f"{name}.{rank}", []))
                self._streams[reports] = _Stream(task, actor, rank == leader)
            return
        if stage.sharding and meta is not None:
            handles = shards(stage, task, meta, layout.data)
            calls = [self._call(name, replica, task, handle) for replica, handle in enumerate(handles)]
            leading, others = [call for call, *_ in calls], [call for _, *rest in calls for call in rest]
            self._follow(_Running(task, dict(leading), dict(others)))
            return
        first, *others = self._call(name, task.replica or 0, task, meta)
        self._follow(_Running(task, dict([first]), dict(others)))

    def wait(self, timeout_s: float) -> list[TaskResult]:
        waiting = [*self._pending, *self._streams]
        if not waiting:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s, fetch_local=True)
        if ready:  # whatever else is there already comes along
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        taken = [self._report(ref) if ref in self._streams else self._result(ref) for ref in ready]
        return [result for result in taken if result]

    def cancel(self, task: Task, groups: Sequence[int]) -> None:
        name = self._planned[task.stage].groups[0]
        assert task.replica is not None
        for rank in self._layouts[name].siblings(task.replica):
            self._actors[name][rank].cancel.remote(tuple(groups))

    def save(self, folder: Path) -> None:
        actors = [actor for name, group in self._actors.items() for actor in group if not self._replaceable[name]]
        self._get_all([actor.save.remote(folder) for actor in actors], f"save {folder.name}")

    def cleared(self, rows: Sequence[str]) -> None:
        for name, actors in self._actors.items():
            for rank in range(len(actors)):
                self._cleared.setdefault(f"{name}.{rank}", []).extend(rows)

    def close(self) -> None:
        for actor in [actor for group in self._actors.values() for actor in group]:
            ray.kill(actor)
        self._actors.clear()
        self._pending.clear()
        self._streams.clear()
        if self.plane is not None:
            with suppress(DataPlaneLost):  # what is lost holds nothing that could be drained
                self.plane.drain()
            self.plane.close()
        for group in self._placement_groups:
            remove_placement_group(group)
        self._placement_groups.clear()
        for module in self._modules:
            if module.__name__ in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _connect(self, plan: Plan) -> None:
        if ray.is_initialized():
            return
        needed = sum(group.cpus * group.workers for group in plan.groups) + DATA_PLANE_CPUS
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        if self._address:
            options = {"address": self._address, "log_to_driver": False, "logging_level": "ERROR"}
        else:
            options["address"] = "local"  # never somebody else's Ray that happens to run on this machine
            options["num_cpus"] = max(int(needed + 0.999), os.cpu_count() or 1, 4)
            options["object_store_memory"] = 512 * 1024**2
            if not self._trusted_network:
                options["_node_ip_address"] = LOOPBACK
        try:
            ray.init(**options)
        except (ConnectionError, RayError, ValueError, RuntimeError) as error:
            raise StageError(
                Problem(
                    where=f"--address {self._address}" if self._address else "Ray",
                    what=f"cannot be reached: {_one_line(error)}",
                    why="the run joins that cluster" if self._address else "the run starts its own Ray",
                    fix="check the address and the token (RAY_AUTH_TOKEN)" if self._address else "see the text above",
                )
            ) from error
        self._owns_ray = True
        needed_gpus = sum(group.gpus for group in plan.groups)
        for kind, asked in (("GPU", needed_gpus), ("CPU", needed)):
            have = ray.cluster_resources().get(kind, 0.0)
            if asked > have:
                raise GraphError(
                    Problem(
                        where=plan.name,
                        what=f"the run asks for {asked:g} {kind}s, the cluster has {have:g}",
                        why="every worker group holds its own for the whole run, and the data plane 2 CPUs",
                        fix="smaller worker groups, or more machines",
                    )
                )

    def _place(
        self, group: WorkerGroup, actor: Any, hosted: bytes, stages: bytes, settings: WorkerSettings
    ) -> Callable[[int], Any]:
        """Finds room for a group; what is returned starts its actor of a rank there."""
        count, gpus = group.processes, group.gpus / group.processes
        cpus = group.cpus * group.workers / count
        if group.name == HOST:  # it writes samples into the run directory, so it stays with the driver
            node = ray.get_runtime_context().get_node_id()
            strategies: list[Any] = [NodeAffinitySchedulingStrategy(node, soft=False)] * count
        else:
            bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
            placed = placement_group([bundle] * count, strategy="PACK")
            self._placement_groups.append(placed)
            if not placed.wait(START_DEADLINE_S):
                raise GraphError(
                    Problem(
                        where=str(group.location),
                        what=f"worker group {group.name!r} found no place in {START_DEADLINE_S:g} s",
                        why=f"it asks for {count} x {bundle}, free are {ray.available_resources()}",
                        fix="fewer workers, or a larger cluster",
                    )
                )
            strategies = [
                PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=i) for i in range(count)
            ]
        variables = environment() | {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
        if group.threads:
            variables["OMP_NUM_THREADS"] = str(group.threads)
        if not group.gpus and "OMP_WAIT_POLICY" not in os.environ:
            variables["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPINS)
        if ray.util.get_node_ip_address() == LOOPBACK:
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        return lambda rank: actor.options(
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy=strategies[rank],
            name=None,
            runtime_env={"env_vars": variables},
        ).remote(rank, hosted, stages, settings)

    def _get_all(self, refs: Sequence[ray.ObjectRef], what: str) -> list[Any]:
        """Wait for calls on all actors; the first error that a worker returned or died with is raised."""
        try:
            answers = ray.get(list(refs), timeout=START_DEADLINE_S)
        except GetTimeoutError as error:
            raise StageError(
                Problem(
                    where="Ray",
                    what=f"the workers did not {what} in {START_DEADLINE_S:g} s",
                    why="every wait has a deadline",
                    fix="look into the logs of the run and of Ray",
                )
            ) from error
        except RayError as error:
            raise _lost(what, error) from error
        for answer in answers:
            if isinstance(answer, SluiceError):
                raise answer
        return answers

    @staticmethod
    def _ranks_meet(group: PlacedGroup, stages: Iterable[PlannedStage]) -> bool:
        """Whether the workers of a group exchange anything: they share a batch, or hold a model together."""
        return group.workers > 1 and (
            group.model_parallel > 1 or any(stage.sharding for stage in stages if stage.name in group.stages)
        )

    def _call(self, group: str, replica: int, task: Task, meta: KVBatchMeta | None) -> list[tuple[ray.ObjectRef, Any]]:
        """Have every rank of a replica run the task: calls and actors, those of the leader first."""
        handle = meta.encode() if meta is not None else None
        calls = []
        for rank in self._layouts[group].siblings(replica):
            actor = self._actors[group][rank]
            calls.append((actor.run.remote(task, handle, self._cleared.pop(f"{group}.{rank}", [])), actor))
        return calls

    def _follow(self, running: _Running) -> None:
        self._pending |= dict.fromkeys([*running.leading, *running.others], running)

    def _report(self, stream: Any) -> TaskResult | None:
        """What a stream yields next; None for what the followers of a leader report, and at the end."""
        running = self._streams[stream]
        task = running.task
        try:
            report: TaskResult = ray.get(next(stream), timeout=START_DEADLINE_S)
        except StopIteration:
            del self._streams[stream]
            return None
        except RayError as error:
            del self._streams[stream]
            return self._without(task, running.actor, error)
        return report if running.leads else TaskResult(task=task, events=report.events, error=report.error)

    def _result(self, ref: ray.ObjectRef) -> TaskResult | None:
        """What a task has come to, once all of its ranks have answered or the first one failed; None until then."""
        running = self._pending.pop(ref)
        task = running.task
        try:
            running.results[ref] = result = ray.get(ref, timeout=START_DEADLINE_S)
        except RayError as error:
            return self._without(task, (running.leading | running.others)[ref], error)
        if result.error:  # the other ranks may wait for this one; the run ends before their deadline does
            return result
        if len(running.results) < len(running.leading) + len(running.others):
            return None
        if running.payload is not None:
            self._served[self._planned[task.stage].groups[-1], task.stage] = task, running.payload
        return running.whole()

    def _without(self, task: Task, actor: Any, error: RayError) -> TaskResult:
        """The report of a task whose worker did not answer: where that died and can be replaced, it is."""
        name, rank = self._find(actor)
        doing = f"finish {task.stage!r} at step {task.step + 1} on {name!r}"
        if not isinstance(error, RayActorError) or not self._replaceable[name]:
            return TaskResult(task=task, error=_lost(doing, error))
        result = TaskResult(task=task, lost=f"worker {name}.{rank} died")
        if self._actors[name][rank] is actor:  # else another task of it has seen to that
            if self._restarts[name] == RESTARTS:
                return TaskResult(task=task, error=_lost(doing, error, f"; {RESTARTS} others died before it"))
            self._restarts[name] += 1
            try:
                result.events.append(self._replace(name, rank))
            except SluiceError as failure:
                return TaskResult(task=task, error=failure)
            self._retired[actor] = name, rank
        return result

    def _find(self, actor: Any) -> tuple[str, int]:
        """Worker group and rank of an actor, also of one that was replaced."""
        for name, actors in self._actors.items():
            if actor in actors:
                return name, actors.index(actor)
        return self._retired[actor]

    def _replace(self, name: str, rank: int) -> Placed:
        """A new worker, with the weights that the old one served."""
        actor = self._births[name](rank)
        what = f"take the place of {name}.{rank}"
        self._get_all([actor.setup.remote()], what)
        ((placed, _),) = self._get_all([actor.connect.remote(self.plane.settings)], what)
        for (group, _), (task, payload) in self._served.items():
            if group == name:
                (received,) = self._get_all([actor.receive.remote(task, payload)], what)
                if received.error:
                    raise received.error
        self._actors[name][rank] = actor
        return placed


@dataclass(frozen=True)
class _Stream:
    """A stream on its way: its actor, and whether that one's reports count."""

    task: Task
    actor: Any
    leads: bool


@dataclass
class _Running:
    """A task on its way: the calls whose results count, and those that only must not fail, each with its actor.

    `payload` is what a transfer carries.
    """

    task: Task
    leading: dict[ray.ObjectRef, Any]
    others: dict[ray.ObjectRef, Any]
    payload: ray.ObjectRef | None = None
    results: dict[ray.ObjectRef, TaskResult] = field(default_factory=dict)

    def whole(self) -> TaskResult:
        """The result of the task; all calls have answered."""
        result = merged(self.task, [self.results[ref] for ref in self.leading])
        others = [self.results[ref] for ref in self.others]
        result.events = [event for other in others for event in other.events] + result.events
        for other in others:
            result.metrics = other.metrics | result.metrics
        return result


def _lost(what: str, error: RayError, more: str = "") -> StageError:
    died = isinstance(error, RayActorError)
    return (WorkerLost if died else StageError)(
        Problem(
            where="Ray",
            what=f"a worker {'died and did not' if died else 'did not'} {what}: {_one_line(error)}{more}",
            why="its task has no result",
            fix="look into the logs of the run and of Ray, then resume",
        )
    )


def _one_line(error: Exception) -> str:
    """The first line that says something; Ray's texts go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" .")]
    return lines[0] if lines else type(error).__name__


class _Hosted:
    """A `Worker` behind Ray's calls."""

    def __init__(self, rank: int, hosted: bytes, stages: bytes, settings: WorkerSettings) -> None:
        group, mine = cloudpickle.loads(hosted)
        self._worker = Worker(group, rank, mine, cloudpickle.loads(stages), settings)

    def meeting_point(self, deadline_s: float) -> tuple[str, int]:
        host = ray.util.get_node_ip_address()
        return host, self._worker.meeting_point(host, deadline_s)

    def join(self, meeting: tuple[str, int], deadline_s: float) -> None:
        self._worker.join(*meeting, deadline_s)

    def setup(self) -> SluiceError | None:
        return self._worker.setup()

    def connect(self, settings: Any) -> tuple[Placed, bool]:
        """Where it runs, and whether another worker can take its place."""
        self._worker.connect(TransferQueuePlane.attach(settings))
        node = ray.util.get_node_ip_address()
        placed = Placed(group=self._worker.group.name, worker=self._worker.rank, node=node, pid=os.getpid())
        return placed, self._worker.is_replaceable

    def _run(self, task: Task, meta: bytes | None, cleared: Sequence[str]) -> TaskResult:
        return self._worker.run(task, KVBatchMeta.decode(meta) if meta is not None else None, cleared)

    def send(self, task: Task) -> tuple[Any, TaskResult]:
        end = _End("source")
        result = self._worker.transfer(task, end)
        return end.payload, result

    def receive(self, task: Task, payload: Any) -> TaskResult:
        if payload is None:  # the source failed, and its result says why
            return TaskResult(task=task)
        return self._worker.transfer(task, _End("target", payload))

    def save(self, folder: Path) -> None:
        self._worker.save(folder)

    def restore(self, folder: Path) -> None:
        self._worker.restore(folder)


@ray.remote
class _Actor(_Hosted):
    """A worker that does one thing after the other."""

    def run(self, task: Task, meta: bytes | None, cleared: Sequence[str]) -> TaskResult:
        return self._run(task, meta, cleared)


@ray.remote
class _StreamActor(_Hosted):
    """A worker with streams, which take turns in its event loop; weights are swapped there too, between two tokens.

    Other tasks run in a thread beside it, one after the other, so that a slow reward does not hold up the decoding.
    """

    def __init__(self, rank: int, hosted: bytes, stages: bytes, settings: WorkerSettings) -> None:
        super().__init__(rank, hosted, stages, settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasks")

    async def run(self, task: Task, meta: bytes | None, cleared: Sequence[str]) -> TaskResult:
        if self._worker.ranks.connected:  # ranks meet in the order in which tasks come, those of streams included
            return self._run(task, meta, cleared)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, task, meta, cleared)

    async def stream(self, task: Task, meta: bytes | None, cleared: Sequence[str]) -> AsyncIterator[TaskResult]:
        handle = KVBatchMeta.decode(meta) if meta is not None else None
        async for report in self._worker.stream(task, handle, cleared):
            yield report

    def cancel(self, groups: Sequence[int]) -> None:
        self._worker.cancel(groups)


class _End:
    """One end of a transfer. The payload goes from actor to actor through Ray's object store, past the driver."""

    def __init__(self, side: Literal["source", "target"], payload: Any = None) -> None:
        self.side, self.payload = side, payload

    def offer(self, payload: Any) -> None:
        self.payload = payload

    def take(self) -> Any:
        return self.payload


def user_modules(graph_module: ModuleType) -> list[ModuleType]:
    """The graph's module and those loaded from below its folder, unless they are part of an installed package."""
    folder = Path(graph_module.__file__ or ".").resolve().parent
    packages = {"pipeline", "stages", "ops", "graphs"}
    found = [graph_module]
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if module is graph_module or not path or name.partition(".")[0] in packages or name == "__main__":
            continue
        resolved = Path(path).resolve()
        if resolved.is_relative_to(folder) and "site-packages" not in resolved.parts:
            found.append(module)
    return found
