"""Where the actors of worker groups run, and in which environment. Knows groups and nodes, no stages."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pipeline.data_plane.transfer_queue import DEADLINE_S, environment
from pipeline.declare.group import HOST, WorkerGroup
from pipeline.errors import GraphError, Problem
from pipeline.executors.answers import START_DEADLINE_S, get_all
from pipeline.executors.storage import bundle_of, described
from pipeline.executors.worker import WorkerSettings
from pipeline.plan.plan import PlacedGroup
from pipeline.precedence import for_another_python

LOOPBACK = "127.0.0.2"  # Ray replaces 127.0.0.1 with the address of the network card, but keeps this one
# By default Ray's workers yield to everything else on the machine (niceness 15). But they do the actual work, and a
# data plane that other programs slow down would be declared lost.
PRIORITY = MappingProxyType({"RAY_worker_niceness": os.environ.get("RAY_worker_niceness", "0")})  # noqa: SIM112 - Ray's
SOON_S = 5.0  # after which a group that waits for room says so
SPINS = "2000"  # for threads that wait for others in their process: workers share cores, and spinning wastes them


def worker_environment(deadline_s: float = DEADLINE_S) -> dict[str, str]:
    """Return the environment variables of a Ray worker: those of the data plane, and its priority."""
    return environment(deadline_s) | dict(PRIORITY)


class PlacementGroups:
    """The placement groups of a run."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._reserved: list[Any] = []

    def reserve(self, bundles: list[dict[str, float]]) -> None:
        """Keep resources for TransferQueue, which places its processes itself, until `release`. Raises GraphError if
        they do not become free."""
        reserved = placement_group(bundles, strategy="PACK")
        self._reserved.append(reserved)
        if not reserved.wait(START_DEADLINE_S):
            raise GraphError(
                Problem(
                    where="TransferQueue",
                    what=f"its {len(bundles)} CPUs could not be reserved within {START_DEADLINE_S:g} s",
                    why="its controller and each storage unit ask for one on their machine; in the whole cluster, "
                    f"{ray.available_resources().get('CPU', 0.0):g} are free",
                    fix="end other jobs on the cluster, or add machines",
                )
            )

    def release(self) -> None:
        """Free what `reserve` kept. Idempotent."""
        for reserved in self._reserved:
            remove_placement_group(reserved)
        self._reserved.clear()

    def place(
        self,
        group: WorkerGroup,
        actor: Any,
        hosted: bytes,
        stages: bytes,
        settings: WorkerSettings,
        beside: Sequence[Any],
    ) -> Callable[[int], Any]:
        """Place a group. The returned function starts the actor of a rank there. `beside` are the actors of the
        group whose GPUs it shares."""
        count, gpus = group.processes, group.gpus / group.processes
        cpus = group.cpus * group.workers / count
        variables = worker_environment() | {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
        visible: list[dict[str, str]] = [{}] * count
        if group.name == HOST:  # it writes samples into the run directory, so it stays on the driver's node
            node = ray.get_runtime_context().get_node_id()
            strategies: list[Any] = [NodeAffinitySchedulingStrategy(node, soft=False)] * count
        elif group.colocated:
            strategies, visible = _beside(group, beside)
            gpus = 0
        else:
            bundle = bundle_of(cpus, gpus)
            placed = placement_group([bundle] * count, strategy="PACK")
            self._held.append(placed)
            if not placed.wait(min(SOON_S, START_DEADLINE_S)):
                print(_without_room(group, count, bundle, SOON_S, is_final=False), file=sys.stderr, flush=True)
                if not placed.wait(START_DEADLINE_S):
                    raise GraphError(_without_room(group, count, bundle, START_DEADLINE_S, is_final=True))
            strategies = [
                PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=i) for i in range(count)
            ]
        if group.threads:
            variables["OMP_NUM_THREADS"] = str(group.threads)
        if not group.gpus and "OMP_WAIT_POLICY" not in os.environ:
            variables["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPINS)
        own: dict[str, str] = {}
        if group.interpreter is not None:
            own["py_executable"] = shlex.quote(group.interpreter)
            variables |= for_another_python()
        return lambda rank: actor.options(
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy=strategies[rank],
            name=None,
            runtime_env={"env_vars": variables | visible[rank], **own},
        ).remote(rank, hosted, stages, settings)

    def close(self) -> None:
        """Release them and what is reserved. Idempotent."""
        self.release()
        for held in self._held:
            remove_placement_group(held)
        self._held.clear()


def placed_first(group: PlacedGroup) -> tuple[int, float, float]:
    """Return the placement order: the host group needs the driver's node, and a colocated group follows its partner.
    In between, large workers come first: small ones find room beside them, not the other way round."""
    return 0 if group.name == HOST else 2 if group.colocated else 1, -group.gpus / group.workers, -group.cpus


def _without_room(
    group: WorkerGroup, count: int, bundle: dict[str, float], waited_s: float, *, is_final: bool
) -> Problem:
    """Return the problem, or the warning, that a group waits for room."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    free = [
        f"{addresses[node]} has {described(left) or 'nothing'}"
        for node, left in available_resources_per_node().items()
        if node in addresses
    ]
    return Problem(
        where=str(group.location),
        what=f"worker group {group.name!r} has found no room for {waited_s:g} s",
        why=f"it asks for {count} x {described(bundle)}; free are: {'; '.join(sorted(free))}",
        fix="end other jobs on the cluster, use fewer or smaller workers, or add machines"
        + ("" if is_final else f"; the run waits for {START_DEADLINE_S:g} s"),
        warning=not is_final,
    )


def _beside(group: WorkerGroup, owners: Sequence[Any]) -> tuple[list[Any], list[dict[str, str]]]:
    """Return where the processes of a colocated group go, and which GPUs each one sees."""
    assert group.colocated is not None
    homes = get_all([actor.home.remote() for actor in owners], "be placed")
    gpus = [(node, gpu) for node, visible in homes for gpu in visible]
    if not gpus:
        return [NodeAffinitySchedulingStrategy(homes[0][0], soft=False)] * group.processes, [{}] * group.processes
    size = len(gpus) // group.processes
    strategies, visible = [], []
    for start in range(0, len(gpus), size):
        (node, *others), ids = zip(*gpus[start : start + size])
        if set(others) - {node}:
            raise GraphError(
                Problem(
                    where=str(group.location),
                    what=f"a worker of group {group.name!r} would span the GPUs of {len({node, *others})} machines",
                    why=f"it shares the GPUs of {group.colocated.name!r}, as they were placed",
                    fix="use machines with as many GPUs as a replica needs, or separate GPUs for each group",
                )
            )
        strategies.append(NodeAffinitySchedulingStrategy(node, soft=False))
        visible.append({"CUDA_VISIBLE_DEVICES": ",".join(ids), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})
    return strategies, visible
