"""Runs a graph on Ray actors: one actor a worker, columns in TransferQueue. The only module that imports ray.

Without an address it starts a Ray of its own on a loopback address, with token authentication, and ends it. With an
address it joins a running cluster. Worker groups are placed by placement groups; the graph's own code travels with the
tasks, so no file of the user needs to exist on another node.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
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
from pipeline.errors import DataPlaneLost, GraphError, Problem, SluiceError, StageError
from pipeline.executors import parts
from pipeline.graph import HOST, Graph, WorkerGroup
from pipeline.meta import KVBatchMeta
from pipeline.plan import Plan, with_samples, worker_groups
from pipeline.stage import Task
from pipeline.trace import Placed
from pipeline.worker import TaskResult, Worker, WorkerSettings

START_DEADLINE_S = 300.0  # to place and set up all workers; models are loaded in it
CLOSE_DEADLINE_S = 10.0
LOOPBACK = "127.0.0.2"  # Ray replaces 127.0.0.1 by the address of the network card; this one it keeps
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
        self._placement_groups: list[Any] = []
        self._planned: dict[str, tuple[tuple[str, ...], str]] = {}
        self._pending: dict[ray.ObjectRef, tuple[Task, str, list[ray.ObjectRef]]] = {}
        self._cleared: dict[str, list[str]] = {}

    def start(self, graph: Graph, plan: Plan, settings: WorkerSettings, restore: Path | None) -> list[Placed]:
        os.environ.update({key: value for key, value in environment().items() if key not in os.environ})
        self._connect(plan)
        self._planned = {stage.name: (stage.groups, stage.per) for stage in plan.stages}
        stages = with_samples(graph)
        by_name = {stage.name: stage for stage in stages}
        groups = {group.name: group for group in worker_groups(stages, graph.host)}
        for module in self._modules:
            cloudpickle.register_pickle_by_value(module)
        blob_of_all = cloudpickle.dumps(tuple(stages))
        setups = []
        for placed in sorted(plan.groups, key=lambda group: group.name != HOST):  # the host group has one node only
            hosted = cloudpickle.dumps((groups[placed.name], tuple(by_name[name] for name in placed.stages)))
            self._actors[placed.name] = self._place(groups[placed.name], hosted, blob_of_all, settings)
            setups += [actor.setup.remote() for actor in self._actors[placed.name]]
        here = f"node:{ray.util.get_node_ip_address()}"  # a resource that only this node has
        self.plane = TransferQueuePlane.create(  # while the models load
            trusted_network=self._trusted_network, storage_resource=here
        )
        actors = [actor for group in self._actors.values() for actor in group]
        self._get_all(setups, "set up")
        placed_at = self._get_all(
            [actor.connect.remote(self.plane.settings) for actor in actors], "join the data plane"
        )
        if restore:
            self._get_all([actor.restore.remote(restore) for actor in actors], f"restore {restore.name}")
        return placed_at

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        names, per = self._planned[task.stage]
        if len(names) == 2:
            source, target = (self._actors[name][0] for name in names)
            payload, sent = source.send.options(num_returns=2).remote(task)
            received = target.receive.remote(task, payload)
            self._pending[received] = (task, names[1], [sent])
            return
        actors = self._actors[names[0]]
        for rank, part in enumerate(parts(task, len(actors), per)):
            share = meta
            if meta is not None and len(part.groups) < len(task.groups):
                size = len(meta) // len(task.groups)
                first = task.groups.index(part.groups[0])
                share = meta.slice(first * size, (first + len(part.groups)) * size)
            cleared = self._cleared.pop(f"{names[0]}.{rank}", [])
            ref = actors[rank].run.remote(part, share.encode() if share is not None else None, cleared)
            self._pending[ref] = (part, names[0], [])

    def wait(self, timeout_s: float) -> list[TaskResult]:
        if not self._pending:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s, fetch_local=True)
        if ready:  # whatever else is there already comes along
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        return [self._result(ref) for ref in ready]

    def save(self, folder: Path) -> None:
        self._get_all([group[0].save.remote(folder) for group in self._actors.values()], f"save {folder.name}")

    def cleared(self, rows: Sequence[str]) -> None:
        for name, actors in self._actors.items():
            for rank in range(len(actors)):
                self._cleared.setdefault(f"{name}.{rank}", []).extend(rows)

    def close(self) -> None:
        for actor in [actor for group in self._actors.values() for actor in group]:
            ray.kill(actor)
        self._actors.clear()
        self._pending.clear()
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

    def _place(self, group: WorkerGroup, hosted: bytes, stages: bytes, settings: WorkerSettings) -> list[Any]:
        gpus = group.gpus / group.workers
        if group.name == HOST:  # it writes samples into the run directory, so it stays with the driver
            node = ray.get_runtime_context().get_node_id()
            strategies: list[Any] = [NodeAffinitySchedulingStrategy(node, soft=False)] * group.workers
        else:
            bundle = {"CPU": group.cpus} | ({"GPU": gpus} if gpus else {})
            placed = placement_group([bundle] * group.workers, strategy="PACK")
            self._placement_groups.append(placed)
            if not placed.wait(START_DEADLINE_S):
                raise GraphError(
                    Problem(
                        where=str(group.location),
                        what=f"worker group {group.name!r} found no place in {START_DEADLINE_S:g} s",
                        why=f"it asks for {group.workers} x {bundle}, free are {ray.available_resources()}",
                        fix="fewer workers, or a larger cluster",
                    )
                )
            strategies = [
                PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=i) for i in range(group.workers)
            ]
        variables = environment() | {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
        if group.threads:
            variables["OMP_NUM_THREADS"] = str(group.threads)
        return [
            _Actor.options(  # type: ignore[attr-defined]
                num_cpus=group.cpus,
                num_gpus=gpus,
                scheduling_strategy=strategies[rank],
                name=None,
                runtime_env={"env_vars": variables},
            ).remote(rank, hosted, stages, settings)
            for rank in range(group.workers)
        ]

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

    def _result(self, ref: ray.ObjectRef) -> TaskResult:
        task, group, others = self._pending.pop(ref)
        try:
            result: TaskResult = ray.get(ref, timeout=START_DEADLINE_S)
            for other in others:
                sent: TaskResult = ray.get(other, timeout=START_DEADLINE_S)
                result.events[:0] = sent.events
                result.metrics = sent.metrics | result.metrics
                result.error = sent.error or result.error
        except RayError as error:
            return TaskResult(
                task=task, error=_lost(f"finish {task.stage!r} at step {task.step + 1} on {group!r}", error)
            )
        return result


def _lost(what: str, error: RayError) -> StageError:
    reason = _one_line(error)
    died = isinstance(error, RayActorError)
    return StageError(
        Problem(
            where="Ray",
            what=f"a worker {'died and did not' if died else 'did not'} {what}: {reason}",
            why="its task has no result",
            fix="look into the logs of the run and of Ray, then resume",
        )
    )


def _one_line(error: Exception) -> str:
    """The first line that says something; Ray's texts go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" .")]
    return lines[0] if lines else type(error).__name__


@ray.remote
class _Actor:
    """A `Worker` behind Ray's calls."""

    def __init__(self, rank: int, hosted: bytes, stages: bytes, settings: WorkerSettings) -> None:
        group, mine = cloudpickle.loads(hosted)
        self._worker = Worker(group, rank, mine, cloudpickle.loads(stages), settings)

    def setup(self) -> SluiceError | None:
        return self._worker.setup()

    def connect(self, settings: Any) -> Placed:
        self._worker.connect(TransferQueuePlane.attach(settings))
        node = ray.util.get_node_ip_address()
        return Placed(group=self._worker.group.name, worker=self._worker.rank, node=node, pid=os.getpid())

    def run(self, task: Task, meta: bytes | None, cleared: Sequence[str]) -> TaskResult:
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
