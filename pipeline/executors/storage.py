"""How many storage units TransferQueue gets, on which nodes, and whether the cluster has room for the run and for them.

Knows nodes as `ray.nodes()` lists them, and not Ray itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.declare.group import HOST
from pipeline.errors import Problem
from pipeline.plan.plan import PlacedGroup, Plan

PER_NODE = "per-node"  # one unit on each node of the cluster
CPUS = 1.0  # that TransferQueue asks for per actor; it has no setting for it
Nodes = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Units:
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

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The resources of the controller and of each unit."""
        return [{"CPU": CPUS}, *({"CPU": CPUS, f"node:{address}": 0.001} for address in self.addresses)]


def units_of(asked: int | str, nodes: Nodes, here: str) -> Units:
    """Return the units for `--storage-units`: a number of them on the node at the address `here`, or one on each node.

    A node without CPUs, such as the head of many clusters, holds no unit.
    """
    if isinstance(asked, int):
        return Units((here,) * asked, f"node:{here}", here)
    return Units(tuple(node["NodeManagerAddress"] for node in _with_cpus(nodes)), "CPU", here)


def data_plane_cpus(asked: int | str, nodes: int) -> float:
    """Return the CPUs of TransferQueue on a cluster of `nodes` nodes."""
    return CPUS + CPUS * (asked if isinstance(asked, int) else nodes)


def cpus_of(groups: Iterable[PlacedGroup]) -> float:
    """Return the CPUs of worker groups."""
    return sum(group.cpus * group.workers for group in groups)


def shortages(plan: Plan, units: Units | None, nodes: Nodes) -> Iterator[Problem]:
    """Yield what a run with these units asks for and these nodes do not have: in all, and on the driver's node."""
    store = units.cpus if units else 0.0
    for kind, asked in (("GPU", plan.gpus), ("CPU", cpus_of(plan.groups) + store)):
        have = sum(node["Resources"].get(kind, 0.0) for node in nodes if node["Alive"])
        if asked > have:
            yield Problem(
                where=plan.name,
                what=f"the run asks for {asked:g} {kind}s, the cluster has {have:g}",
                why=f"every worker group holds its resources for the whole run, and TransferQueue {store:g} CPUs",
                fix="use smaller worker groups, or more machines",
            )
            return
    if units:
        yield from _shortage_here(plan, units, nodes)


def _shortage_here(plan: Plan, units: Units, nodes: Nodes) -> Iterator[Problem]:
    """Yield that the driver's node lacks CPUs for its units and for the host group."""
    local, host = units.addresses.count(units.here), cpus_of(group for group in plan.groups if group.name == HOST)
    have = sum(n["Resources"].get("CPU", 0.0) for n in _with_cpus(nodes) if n["NodeManagerAddress"] == units.here)
    if local * CPUS + host > have:
        yield Problem(
            where=plan.name,
            what=f"the run asks for {local * CPUS + host:g} CPUs on the driver's machine, which has {have:g}",
            why=f"the host group ({host:g} CPUs) and {local} of TransferQueue's storage units (1 each) run there",
            fix=f"--storage-units {PER_NODE}, or start the run on a larger machine",
        )


def _with_cpus(nodes: Nodes) -> list[Mapping[str, Any]]:
    """Return the running nodes that have CPUs."""
    return [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
