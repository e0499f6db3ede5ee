"""How many storage units TransferQueue gets, on which nodes, and whether the cluster has room for the run and for them.

Knows nodes as `ray.nodes()` lists them, and not Ray itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.declare.group import HOST
from pipeline.errors import Problem, counted
from pipeline.plan.plan import PlacedGroup, Plan

PER_NODE = "per-node"  # one unit on each node of the cluster
CPUS = 1.0  # that TransferQueue asks for per actor; it has no setting for it
NO_GPUS = "a machine with GPUs, --address of a cluster with some, or gpus=0 for groups whose backend computes on a CPU"
Nodes = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class StorageUnits:
    """Storage units at these addresses of nodes, and the Ray resource of the nodes over which TransferQueue deals them.

    `here` is the address of the driver's node.
    """

    addresses: tuple[str, ...]
    resource: str
    here: str

    @property
    def count(self) -> int:
        """The number of units."""
        return len(self.addresses)

    @property
    def cpus(self) -> float:
        """The CPUs of the controller and the units."""
        return CPUS + CPUS * self.count

    def bundles(self, plan: Plan, nodes: Nodes) -> list[dict[str, float]]:
        """Return the resources of the controller and of each unit.

        The controller's are on the driver's node if that has room beside its units and the host group: elsewhere they
        could take the room of a worker that needs nearly a whole node.
        """
        controller = _bundle(self.here) if self.controller_resource(plan, nodes) else {"CPU": CPUS}
        return [controller, *map(_bundle, self.addresses)]

    def controller_resource(self, plan: Plan, nodes: Nodes) -> str | None:
        """Return the Ray resource of the driver's node, if that has room for the controller: the loss of another node
        then does not end it. None is any node."""
        room = _cpus_at(self.here, nodes) - self._asked_here(plan) >= CPUS
        return f"node:{self.here}" if room else None

    def shortage_here(self, plan: Plan, nodes: Nodes) -> Iterator[Problem]:
        """Yield that the driver's node lacks CPUs for its units and for the host group."""
        asked, have, local = self._asked_here(plan), _cpus_at(self.here, nodes), self.addresses.count(self.here)
        if asked > have:
            yield Problem(
                where=plan.name,
                what=f"the run asks for {asked:g} CPUs on the driver's machine, which has {have:g}",
                why=f"the host group and {local} of TransferQueue's storage units, with one CPU each, run there",
                fix=f"--storage-units {PER_NODE}, or start the run on a larger machine",
            )

    def _asked_here(self, plan: Plan) -> float:
        host = cpus_of(group for group in plan.groups if group.name == HOST)
        return host + CPUS * self.addresses.count(self.here)


def units_of(asked: int | str, nodes: Nodes, here: str) -> StorageUnits:
    """Return the units for `--storage-units`: a number of them on the node at the address `here`, or one on each node.

    A node without CPUs, such as the head of many clusters, holds no unit.
    """
    if isinstance(asked, int):
        return StorageUnits((here,) * asked, f"node:{here}", here)
    return StorageUnits(tuple(node["NodeManagerAddress"] for node in _with_cpus(nodes)), "CPU", here)


def data_plane_cpus(asked: int | str, nodes: int) -> float:
    """Return the CPUs of TransferQueue on a cluster of `nodes` nodes."""
    return CPUS + CPUS * (asked if isinstance(asked, int) else nodes)


def cpus_of(groups: Iterable[PlacedGroup]) -> float:
    """Return the CPUs of worker groups."""
    return sum(group.cpus * group.workers for group in groups)


def shortages(plan: Plan, units: StorageUnits | None, nodes: Nodes) -> Iterator[Problem]:
    """Yield what a run with these units asks for and these nodes do not have: in all, on the driver's node, and on any
    one node."""
    store = units.cpus if units else 0.0
    for kind, asked in (("GPU", plan.gpus), ("CPU", cpus_of(plan.placed) + store)):
        have = sum(node["Resources"].get(kind, 0.0) for node in nodes if node["Alive"])
        if asked > have:
            yield Problem(
                where=plan.name,
                what=f"the run asks for {_amount(asked, kind)}, the cluster has {f'{have:g}' if have else 'none'}",
                why="every worker group holds its resources for the whole run, and TransferQueue "
                f"{_amount(store, 'CPU')}",
                fix="use smaller worker groups, or more machines" if have or kind == "CPU" else NO_GPUS,
            )
            return
    if units:
        yield from units.shortage_here(plan, nodes)
    yield from _too_large(plan, nodes)


def bundle_of(cpus: float, gpus: float) -> dict[str, float]:
    """Return the resources of a worker."""
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {})


def described(resources: Mapping[str, float]) -> str:
    """Return CPUs and GPUs as text."""
    return ", ".join(_amount(resources[kind], kind) for kind in ("CPU", "GPU") if resources.get(kind))


def _amount(number: float, kind: str) -> str:
    """Return a number of CPUs or GPUs as text; a worker may ask for a part of one."""
    return counted(int(number), kind) if number == int(number) else f"{number:g} {kind}s"


def _too_large(plan: Plan, nodes: Nodes) -> Iterator[Problem]:
    """Yield the worker groups whose workers do not fit on the nodes even if nothing else runs there."""
    alive = [node for node in nodes if node["Alive"]]
    for group in plan.placed:
        bundle = bundle_of(group.cpus, 0 if group.colocated else group.gpus / group.workers)
        fit = sum(_times(bundle, node["Resources"], group.workers) for node in alive)
        if fit < group.workers and group.name != HOST:
            have = "; ".join(
                sorted(f"{node['NodeManagerAddress']} has {described(node['Resources'])}" for node in alive)
            )
            yield Problem(
                where=plan.name,
                what=f"worker group {group.name!r} asks for {group.workers} x {described(bundle)}, and {fit} of them "
                "fit on the cluster's machines",
                why=f"a worker runs on one machine: {have}",
                fix="fewer or smaller workers, or larger machines",
            )


def _times(bundle: Mapping[str, float], resources: Mapping[str, float], most: int) -> int:
    """Return how many times the bundle fits, at most `most`."""
    return int(min([most, *(resources.get(kind, 0.0) // asked for kind, asked in bundle.items() if asked)]))


def _bundle(address: str) -> dict[str, float]:
    """Return the resources of one of TransferQueue's processes on the node with this address."""
    return {"CPU": CPUS, f"node:{address}": 0.001}


def _cpus_at(address: str, nodes: Nodes) -> float:
    return sum(node["Resources"]["CPU"] for node in _with_cpus(nodes) if node["NodeManagerAddress"] == address)


def _with_cpus(nodes: Nodes) -> list[Mapping[str, Any]]:
    """Return the running nodes that have CPUs."""
    return [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
