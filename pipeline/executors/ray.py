"""Runs a graph on Ray actors: one actor per worker, columns in TransferQueue.

Without an address it starts its own Ray on a loopback address, with token authentication, and shuts it down. With an
address it joins a running cluster. Placement groups place the worker groups. The graph's code travels with its tasks;
other nodes need no user files.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

# Ray reads this once, at import. If Ray was imported before, the choice was made there.
if "ray" not in sys.modules:
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError

from pipeline.data_plane.patience import AbandonedError, in_thread
from pipeline.data_plane.transfer_queue import Settings, TransferQueuePlane, environment
from pipeline.declare.graph import Graph
from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.ranks import RankLayout
from pipeline.declare.stage import Stage
from pipeline.declare.task import Task
from pipeline.errors import DataPlaneLost, GraphError, PeerLost, StageError, Unfit
from pipeline.executors import shards
from pipeline.executors.actor_groups import ActorGroups
from pipeline.executors.actors import Actor, ServingActor, StreamActor
from pipeline.executors.answers import (
    EXCHANGE_DEADLINE_S,
    SETUP_DEADLINE_S,
    START_DEADLINE_S,
    get_all,
    not_started,
    unanswered,
)
from pipeline.executors.connection import Connection
from pipeline.executors.heartbeat import Heartbeat
from pipeline.executors.interpreters import check_interpreters
from pipeline.executors.losses import Losses
from pipeline.executors.machines import Machines
from pipeline.executors.outputs import TaskResult
from pipeline.executors.placement import PlacementGroups, placed_first
from pipeline.executors.sent import user_folders
from pipeline.executors.servers import Servers
from pipeline.executors.storage import StorageUnits, cpus_of, data_plane_cpus, shortages, units_of
from pipeline.executors.task_calls import Stream, TaskCalls
from pipeline.executors.transfers import Transfers
from pipeline.executors.turns import Turns
from pipeline.executors.worker import WorkerSettings
from pipeline.plan.plan import PlacedGroup, Plan, PlannedStage
from pipeline.plan.planner import placed_groups, with_samples
from pipeline.record.trace import Placed, Turned
from pipeline.rundir import RunDir

PLANE_ATTEMPTS = 5
WRITE_S = 3600.0  # for all workers to write their state
CLOSE_S = 30.0  # for Ray to end the workers and the data plane


class RayExecutor:
    """The executor of actors.

    `modules` are the user's modules, pickled by value; `address` joins a cluster; `trusted_network` lets the data plane
    listen beyond loopback, which a multi-machine cluster needs. `storage_units` is the number of TransferQueue's
    storage units on this machine, or "per-node" for one on each machine of the cluster. `last_words` prints how the run
    goes on, before this process ends because Ray's control store has died under a call of Ray's. `on_start` is called
    with what each part of a start waits for.
    """

    name = "ray"
    store: Settings | None = None  # an existing TransferQueue that outlives the run; set per process

    def __init__(
        self, *, address: str | None = None, modules: Sequence[ModuleType] = (), trusted_network: bool = False,
        storage_units: int | str = 1, last_words: Callable[[], None] = lambda: None,
        on_start: Callable[[str], None] = lambda doing: None,
    ) -> None:  # fmt: skip
        self._on_start = on_start
        self._modules, self._trusted_network, self._storage_units = modules, trusted_network, storage_units
        self._connection = Connection(address, last_words, loopback=not (address or trusted_network))
        self.plane: Any = None
        self._controller_resource: str | None = None  # of the node of TransferQueue's controller
        self._groups = ActorGroups()
        self._transfers = Transfers(self._groups)
        self._heartbeat = Heartbeat()
        self._machines = Machines()
        self._stages: dict[str, Stage] = {}
        self._there: dict[str, list[str]] = {}  # by machine: the names of the processes there, for messages
        self._placement = PlacementGroups()
        self._planned: dict[str, PlannedStage] = {}
        self._pending: dict[ray.ObjectRef, TaskCalls] = {}
        self._streams: dict[Any, Stream] = {}  # by the reference of its reports
        self._cleared: dict[str, list[str]] = {}
        self._replaced: list[Placed] = []  # workers that serve others, since the last report

    def start(self, graph: Graph, plan: Plan, settings: WorkerSettings, restore: Path | None) -> list[Placed]:
        folders = user_folders(self._modules)
        settings = replace(settings, folders=tuple(map(str, folders)))
        os.environ.update({key: value for key, value in environment().items() if key not in os.environ})
        stages = with_samples(graph)
        groups = {group.name: group for group in placed_groups(stages, graph.host)}
        check_interpreters(groups.values())
        self._on_start("Ray")
        needed = cpus_of(plan.placed) + data_plane_cpus(self._storage_units, nodes=1)
        log = RunDir(settings.run_dir).logs / "ray.log" if settings.run_dir else None
        self._connection.open(max(int(needed + 0.999), os.cpu_count() or 1, 4), folders, log)
        units = self._reserve(plan)
        self._planned = {stage.name: stage for stage in plan.stages}
        by_name = self._stages = {stage.name: stage for stage in stages}
        for module in self._modules:
            cloudpickle.register_pickle_by_value(module)
        self._turns = Turns(plan, self._turn)
        self._on_start("the processes of the workers")
        blob_of_all = cloudpickle.dumps(tuple(stages))
        setups: dict[str, list[ray.ObjectRef]] = {}
        joins: list[ray.ObjectRef] = []
        for placed in sorted(plan.placed, key=placed_first):
            hosted = cloudpickle.dumps((groups[placed.name], tuple(by_name[name] for name in placed.stages)))
            streams = any(self._planned[name].shape == "stream" for name in placed.stages)
            actor: Any = ServingActor if placed.serves else StreamActor if streams else Actor
            group, beside = groups[placed.name], self._groups.actors[placed.colocated] if placed.colocated else ()
            birth = self._placement.place(group, actor, hosted, blob_of_all, settings, beside)
            actors = self._groups.add(placed.name, placed.workers, RankLayout.of(group), birth)
            met: list[ray.ObjectRef] = []
            if self._ranks_meet(placed, plan.stages):
                meeting = actors[0].meeting_point.remote(START_DEADLINE_S)
                met = [actor.join.remote(meeting, EXCHANGE_DEADLINE_S) for actor in actors]
            joins += met
            setups[placed.name] = [actor.setup.remote(after) for actor, after in zip_longest(actors, met)]
        loading = plan.loading(setups)
        self._on_start(f"the data plane; {loading}")
        self.plane = self._open_plane(units)  # while the models load
        actors = self._groups.all()
        self._started(joins, "meet the other ranks of their group", lambda: loading)
        self._started(chain(*setups.values()), "set up", lambda: plan.loading(unanswered(setups)), SETUP_DEADLINE_S)
        joins = [actor.connect.remote(self.plane.settings) for actor in actors]
        joined = self._started(joins, "join the data plane", lambda: "the data plane")
        for placed_at, replaceable in joined:
            self._groups.replaceable[placed_at.group] = replaceable and not plan.partners(placed_at.group)
            self._groups.placed(placed_at)
        self._servers = Servers(plan, self._groups)
        self._servers.announce()
        if restore:
            restored = [actor.restore.remote(restore) for actor in actors]
            self._started(restored, f"restore {restore.name}", lambda: restore.name)
        self._heartbeat.watch(actors)
        self._watch_machines([placed_at for placed_at, _ in joined])
        self._losses = Losses(
            self._groups, self._transfers, self._heartbeat, self.plane.settings,
            look=self._look, joined=self._joined,
        )  # fmt: skip
        self._on_start("the first step")
        return [placed_at for placed_at, _ in joined]

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        stage = self._planned[task.stage]
        self._turns.before(stage)
        if stage.shape == "transfer":
            self._follow(self._transfers.start(task, stage, self._stages[stage.name]))
            return
        name = stage.groups[0]
        if stage.shape == "stream":
            assert task.replica is not None
            handle = meta.encode() if meta is not None else None
            for place, (rank, actor) in enumerate(self._groups.replica(name, task.replica)):
                stream = actor.stream.options(num_returns="streaming")
                reports = stream.remote(task, handle, self._cleared.pop(f"{name}.{rank}", []))
                self._streams[reports] = Stream(task, actor, leads=place == 0)
            return
        if stage.sharding and meta is not None:
            handles = shards(stage, task, meta, self._groups.layouts[name].data)
            calls = [self._call(name, replica, task, handle) for replica, handle in enumerate(handles)]
            leading, others = [call for call, *_ in calls], [call for _, *rest in calls for call in rest]
            self._follow(TaskCalls(task, dict(leading), dict(others)))
            return
        first, *others = self._call(name, task.replica or 0, task, meta)
        self._follow(TaskCalls(task, dict([first]), dict(others)))

    def wait(self, timeout_s: float) -> list[TaskResult]:
        self._heartbeat.look()
        self._look()
        waiting = [*self._pending, *self._streams, *self._servers.lives]
        if not waiting:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s, fetch_local=True)
        if ready:  # everything else that is already there comes along
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for life in [ref for ref in ready if ref in self._servers.lives]:
            ready.remove(life)
            try:
                ray.get(life)
            except RayError as error:
                self._replaced.append(self._losses.server(self._servers.died(life), error))
        taken = [self._report(ref) if ref in self._streams else self._result(ref) for ref in ready]
        results = [result for result in taken if result]
        if results:
            results[0].events[:0] = [*self._turns.taken(), *self._replaced]
            self._replaced.clear()
        return results

    def _all(
        self,
        refs: Sequence[ray.ObjectRef],
        what: str,
        deadline_s: float = START_DEADLINE_S,
        *,
        among: Sequence[Any] = (),
    ) -> list[Any]:
        """Wait for calls on workers, but not for a Ray whose control store or node has died."""
        return get_all(refs, what, deadline_s, among=among, look=self._look)

    def _started(
        self, refs: Iterable[ray.ObjectRef], what: str, waiting: Callable[[], str],
        deadline_s: float = START_DEADLINE_S,
    ) -> list[Any]:  # fmt: skip
        """Wait for calls of the start, and say every second what they wait for."""

        def look() -> None:
            self._look()
            if what := waiting():
                self._on_start(what)

        return get_all(list(refs), what, deadline_s, look=look)

    def _look(self) -> None:
        """Raise StageError if Ray's control store has died, or WorkerLost if one of its nodes has: calls that need them
        would not return."""
        self._machines.look()
        self._connection.look()

    def cancel(self, task: Task, groups: Sequence[int]) -> None:
        name = self._planned[task.stage].groups[0]
        assert task.replica is not None
        for _, actor in self._groups.replica(name, task.replica):
            actor.cancel.remote(tuple(groups))

    def hold(self, folder: Path) -> None:
        actors = list(self._groups.stateful().values())
        self._all([actor.hold.remote(folder) for actor in actors], f"save {folder.name}", WRITE_S, among=actors)

    def saved(self, folder: Path) -> dict[str, dict[str, int]]:
        stateful = self._groups.stateful()
        actors = list(stateful.values())
        self._all([actor.saved.remote() for actor in actors], "write their state", WRITE_S, among=actors)
        files = self._all([actor.files.remote(folder) for actor in actors], "list what they wrote", among=actors)
        return dict(zip(stateful, files, strict=True))

    def saved_bytes(self) -> int:
        actors = list(self._groups.stateful().values())
        return sum(self._all([actor.saved_bytes.remote() for actor in actors], "measure their state", among=actors))

    def cleared(self, rows: Sequence[str]) -> None:
        for name, actors in self._groups.actors.items():
            for rank in range(len(actors)):
                self._cleared.setdefault(f"{name}.{rank}", []).extend(rows)

    def close(self) -> None:
        """End the workers, the data plane and, if the run started it, Ray; without its help if it does not answer."""
        self._machines.close()
        if self._connection.is_dead:  # Ray's calls would not return
            self._connection.give_up()
        else:
            try:
                in_thread(self._let_go, CLOSE_S, "Ray", self._connection.look)
            except StageError:
                self._connection.give_up()
            except AbandonedError:
                own = self._connection.is_own
                rest = "its processes are killed" if own else "the run's workers may be left in its cluster"
                print(f"Ray has not ended the workers within {CLOSE_S:g} s: {rest}", file=sys.stderr)
                self._connection.give_up()
        for module in self._modules:
            if module.__name__ in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)
        self._connection.close()

    @property
    def can_restart(self) -> bool:
        """Whether this process can start another Ray, once this one is closed: it has let go of the old one."""
        return not self._connection.is_open

    def _let_go(self) -> None:
        for actor in self._groups.all():
            ray.kill(actor)
        self._groups.actors.clear()
        self._transfers.meetings.close()
        self._pending.clear()
        self._streams.clear()
        if self.plane is not None:
            with suppress(DataPlaneLost):  # a lost data plane has nothing to drain
                self.plane.drain()
            self.plane.close()
        self._placement.close()
        self._connection.shut_down()

    def _reserve(self, plan: Plan) -> StorageUnits | None:
        """Reserve the CPUs of TransferQueue, so that no worker group takes them; None if it runs already. Raises
        GraphError if the cluster lacks resources of the run."""
        nodes, here = ray.nodes(), ray.util.get_node_ip_address()
        units = None if self.store else units_of(self._storage_units, nodes, here)
        if problems := tuple(shortages(plan, units, nodes)):
            raise GraphError(*problems)
        if units:
            self._placement.reserve(units.bundles(plan, nodes))
            self._controller_resource = units.controller_resource(plan, nodes)
        return units

    def _open_plane(self, units: StorageUnits | None) -> TransferQueuePlane:
        """Return a data plane with these storage units. Ray may still list the one of a run that just ended."""
        if units is None:
            assert self.store is not None
            return TransferQueuePlane.attach(self.store)
        self._placement.release()
        create = partial(
            TransferQueuePlane.create, trusted_network=self._trusted_network, storage_units=units.count,
            storage_resource=units.resource, controller_resource=self._controller_resource,
        )  # fmt: skip
        for _ in range(PLANE_ATTEMPTS):
            try:
                return create()
            except RayActorError as error:
                cause = error
                TransferQueuePlane.forget()
                time.sleep(1.0)
        raise not_started("TransferQueue", cause) from cause

    def _watch_machines(self, placed: Iterable[Placed]) -> None:
        """Watch Ray's nodes on the machines of these workers and of TransferQueue's processes."""
        there = [(at.node, f"{at.group}.{at.worker}") for at in placed]
        there += [(address, name) for name, (address, _) in self.plane.settings.addresses.items()]
        for address, name in there:
            names = self._there.setdefault(address, [])
            names += [name] * (name not in names)
        ports = {node["NodeManagerAddress"]: node["NodeManagerPort"] for node in ray.nodes() if node["Alive"]}
        self._machines.watch({address: ports[address] for address in ports.keys() & self._there}, self._there)

    def _joined(self, placed: Placed) -> None:
        """A worker has taken the place of another one."""
        self._watch_machines([placed])
        self._servers.moved(placed)

    def _turn(self, name: str, awake: bool, room: int | None) -> list[Turned]:
        """Wake the workers of a group or put them to sleep."""
        actors = self._groups.actors[name]
        calls = [actor.turn.remote(awake, room) for actor in actors]
        return self._all(calls, "wake up" if awake else "release their memory", among=actors)

    @staticmethod
    def _ranks_meet(group: PlacedGroup, stages: Iterable[PlannedStage]) -> bool:
        """Return whether the workers of a group communicate, because they share a batch or a model."""
        return group.workers > 1 and (
            group.model_parallel > 1 or any(stage.sharding for stage in stages if stage.name in group.stages)
        )

    def _call(self, group: str, replica: int, task: Task, meta: KVBatchMeta | None) -> list[tuple[ray.ObjectRef, Any]]:
        """Run the task on every rank of a replica. Returns calls and actors, the leader's first."""
        handle = meta.encode() if meta is not None else None
        calls = []
        for rank, actor in self._groups.replica(group, replica):
            calls.append((actor.run.remote(task, handle, self._cleared.pop(f"{group}.{rank}", [])), actor))
        return calls

    def _follow(self, calls: TaskCalls) -> None:
        self._pending |= dict.fromkeys([*calls.leading, *calls.others], calls)

    def _report(self, stream: Any) -> TaskResult | None:
        """Return the next report of a stream; None at its end."""
        running = self._streams[stream]
        task = running.task
        try:
            report: TaskResult = ray.get(next(stream), timeout=START_DEADLINE_S)
        except StopIteration:
            del self._streams[stream]
            return None
        except RayError as error:
            del self._streams[stream]
            return self._losses.without(task, running.actor, error)
        if isinstance(report.error, Unfit):
            del self._streams[stream]
            return self._losses.instead(task, running.actor, report.error)
        if report.error and (lost_one := self._losses.among(self._groups.siblings(running.actor), task)):
            del self._streams[stream]
            return lost_one
        return report if running.leads else TaskResult(task=task, events=report.events, error=report.error)

    def _result(self, ref: ray.ObjectRef) -> TaskResult | None:
        """Return the result of a task once all ranks have returned or one has failed; None before that."""
        calls = self._pending.pop(ref)
        task = calls.task
        try:
            result: TaskResult = ray.get(ref, timeout=START_DEADLINE_S)
        except RayError as error:
            if isinstance(error, RayTaskError) and isinstance(error, RayActorError):
                return None  # this worker is alive; the call of its dead source reports the loss too
            return self._losses.without(task, (calls.leading | calls.others)[ref], error)
        if isinstance(result.error, Unfit):
            return self._losses.instead(task, (calls.leading | calls.others)[ref], result.error)
        calls.results[ref] = result
        if result.error and calls.meeting and not calls.error:
            calls.error = result.error
            self._transfers.meetings.fail(calls.meeting.name, str(result.error))
        if result.error and not isinstance(result.error, PeerLost):
            # other ranks may wait for this one; the run ends before their deadline
            return self._losses.among((calls.leading | calls.others).values(), task) or result
        if len(calls.results) < len(calls.leading) + len(calls.others):
            return self._reached(calls, ref)
        whole = calls.whole()
        if calls.offer and not whole.error and (gone := self._groups.retired.keys() & set(calls.leading.values())):
            name, rank = self._groups.retired[next(iter(gone))]
            return TaskResult(task=task, lost=f"worker {name}.{rank} was replaced after it had received the weights")
        if calls.offer and not whole.error:
            self._transfers.served[task.stage] = calls.offer
        return whole

    def _reached(self, calls: TaskCalls, ref: ray.ObjectRef) -> TaskResult | None:
        """Return a report that one of several replicas has the whole version while others do not, or None."""
        if not calls.offer or ref not in calls.leading:
            return None
        name, rank = self._groups.find(calls.leading[ref])
        replica = self._groups.layouts[name].replica(rank)
        siblings = set(self._groups.siblings(calls.leading[ref]))
        own = [call for call, actor in calls.leading.items() if actor in siblings]
        has = all(call in calls.results and not calls.results[call].error for call in own)
        return TaskResult(task=calls.task, served=replica) if has and len(own) < len(calls.leading) else None
