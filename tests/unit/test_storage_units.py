"""Where TransferQueue's storage units go, and what a cluster lacks for a run; nodes are dicts, as Ray lists them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pipeline import run
from pipeline.cli.executor_flags import storage_units
from pipeline.errors import GraphError
from pipeline.executors.placement import placed_first
from pipeline.executors.storage import PER_NODE, data_plane_cpus, shortages, units_of
from pipeline.executors.worker import WorkerSettings
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from tests.unit import toy

PLAN = plan(toy.graph())[0]  # sampler, learner and host with one CPU each


def nodes(**cpus: float) -> list[dict]:
    """Return nodes with these CPUs, by the last letter of their address; "x" is gone."""
    return [
        {"Alive": name != "x", "NodeManagerAddress": f"node-{name}", "Resources": {"CPU": count} if count else {}}
        for name, count in cpus.items()
    ]


def short(asked: int | str, here: str = "node-a", **cpus: float) -> str:
    """Return what the cluster lacks, as text; empty if it lacks nothing."""
    cluster = nodes(**cpus)
    return "\n".join(map(str, shortages(PLAN, units_of(asked, cluster, here), cluster)))


def test_a_number_of_units_is_on_the_drivers_node():
    cluster = nodes(a=8, b=8)
    units = units_of(3, cluster, "node-b")
    assert (units.count, units.resource, units.cpus) == (3, "node:node-b", 4)
    assert units.bundles(PLAN, cluster) == [{"CPU": 1.0, "node:node-b": 0.001}] * 4


def test_the_controller_is_anywhere_if_the_drivers_node_has_no_room_for_it():
    """The host group has one CPU, and the unit another one."""
    here = {"CPU": 1.0, "node:node-a": 0.001}
    assert units_of(1, nodes(a=2, b=8), "node-a").bundles(PLAN, nodes(a=2, b=8)) == [{"CPU": 1.0}, here]
    assert units_of(1, nodes(a=3, b=8), "node-a").bundles(PLAN, nodes(a=3, b=8)) == [here, here]


def test_there_is_one_unit_on_each_node_that_has_cpus():
    units = units_of(PER_NODE, nodes(a=0, b=8, c=1, x=8), "node-a")
    assert units.addresses == ("node-b", "node-c")
    assert (units.count, units.resource, units.cpus) == (2, "CPU", 3)
    assert [data_plane_cpus(asked, nodes=1) for asked in (1, 3, PER_NODE)] == [2, 4, 2]


def test_a_cluster_with_room_lacks_nothing():
    assert short(2, a=6) == short(1, a=2, b=3) == short(PER_NODE, a=2, b=4) == ""


def test_a_cluster_without_cpus_for_the_units_is_refused():
    assert short(2, a=5) == (
        "toy: the run asks for 6 CPUs, the cluster has 5; every worker group holds its resources for the whole run, "
        "and TransferQueue 3 CPUs. Fix: use smaller worker groups, or more machines"
    )
    assert "the run asks for 6 CPUs, the cluster has 5;" in short(PER_NODE, a=2, b=3, x=9)


def test_a_cluster_without_gpus_is_told_where_the_run_can_compute():
    groups = tuple(msgspec.structs.replace(group, gpus=int(group.name == "learner")) for group in PLAN.groups)
    asked, cluster = msgspec.structs.replace(PLAN, groups=groups), nodes(a=9)
    (problem,) = shortages(asked, None, cluster)
    assert problem.what == "the run asks for 1 GPU, the cluster has none"
    assert problem.fix == (
        "a machine with GPUs, --address of a cluster with some, or gpus=0 for groups whose backend computes on a CPU"
    )
    cluster[0]["Resources"]["GPU"] = 1
    assert not list(shortages(asked, None, cluster))
    groups = tuple(msgspec.structs.replace(group, gpus=2 * group.gpus) for group in groups)
    (problem,) = shortages(msgspec.structs.replace(PLAN, groups=groups), None, cluster)
    assert problem.what == "the run asks for 2 GPUs, the cluster has 1"
    assert problem.fix == "use smaller worker groups, or more machines"


def large(cluster: list[dict], **flags: float) -> list[str]:
    """Return which groups are too large for any node of a cluster, and why."""
    groups = tuple(msgspec.structs.replace(group, **flags) for group in PLAN.groups if group.name == "learner")
    asked = msgspec.structs.replace(PLAN, groups=groups)
    return [f"{problem.what}; {problem.why}" for problem in shortages(asked, None, cluster)]


def test_workers_that_fit_on_no_node_are_refused():
    assert large(nodes(a=4, b=4), cpus=4.0) == []
    assert large(nodes(a=3, b=3, x=9), cpus=4.0) == [
        "worker group 'learner' asks for 1 x 4 CPUs, and 0 of them fit on the cluster's machines; a worker runs on one "
        "machine: node-a has 3 CPUs; node-b has 3 CPUs"
    ]
    assert large(nodes(a=4, b=2), workers=2, cpus=2.0) == []
    (problem,) = large(nodes(a=3, b=3), workers=3, cpus=2.0)
    assert "3 x 2 CPUs, and 2 of them fit" in problem
    with_gpus = nodes(a=4, b=4)
    with_gpus[0]["Resources"]["GPU"] = 2
    assert large(with_gpus, workers=2, gpus=2) == []
    (problem,) = large(with_gpus, workers=2, gpus=2, cpus=3.0)
    assert "2 x 3 CPUs, 1 GPU, and 1 of them fit" in problem and "node-a has 4 CPUs, 2 GPUs; node-b has" in problem


def test_large_workers_are_placed_before_small_ones_and_after_the_host():
    cpus = {"host": 1.0, "sampler": 2.0, "learner": 9.0}
    groups = [msgspec.structs.replace(group, cpus=cpus[group.name]) for group in PLAN.groups]
    assert [group.name for group in sorted(groups, key=placed_first)] == ["host", "learner", "sampler"]


def test_the_controller_is_on_the_drivers_node_if_that_has_room():
    assert units_of(1, nodes(a=3, b=8), "node-a").controller_resource(PLAN, nodes(a=3, b=8)) == "node:node-a"
    assert units_of(1, nodes(a=2, b=8), "node-a").controller_resource(PLAN, nodes(a=2, b=8)) is None


def test_a_driver_without_cpus_for_the_units_is_refused():
    assert short(3, a=3, b=9) == (
        "toy: the run asks for 4 CPUs on the driver's machine, which has 3; the host group and 3 of TransferQueue's "
        "storage units, with one CPU each, run there. Fix: --storage-units per-node, or start the run on a larger "
        "machine"
    )


def test_without_a_store_of_its_own_a_run_needs_its_groups_cpus():
    assert not list(shortages(PLAN, None, nodes(a=3)))
    (problem,) = shortages(PLAN, None, nodes(a=2))
    assert "TransferQueue 0 CPUs" in problem.why


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("12", 12), ("per-node", PER_NODE)])
def test_the_flag(text, value):
    assert storage_units(text) == value


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
@pytest.mark.parametrize("units", [1, 3, PER_NODE])
def test_a_resumed_run_has_as_many_and_joins_the_same_cluster(units, address):
    words = f" --address {address} --trusted-network" if address else ""
    words += "" if units == 1 else f" --storage-units {units}"
    options = SimpleNamespace(
        executor="ray", storage_units=units, address=address, trusted_network=bool(address), mirror=None
    )
    asked = SimpleNamespace(options=options, file=SimpleNamespace(named="graph.py"), near=str)
    command = run._resume_command(asked, RunDir(Path("run")))  # type: ignore[arg-type]
    assert command.endswith(f"graph.py --executor ray{words} --run-dir run --resume")


@pytest.mark.parametrize("cpus", [4, 6])
def test_a_run_reserves_them_before_it_places_a_worker(monkeypatch, cpus):
    from pipeline.executors import ray as subject

    done: list = []
    executor = subject.RayExecutor(storage_units=2)
    executor._placement = SimpleNamespace(  # type: ignore[assignment]
        reserve=lambda bundles: done.append(len(bundles)), place=lambda *_: done.append("place") or 1 / 0
    )
    monkeypatch.setattr(subject.RayExecutor, "store", None)
    monkeypatch.setattr(executor._connection, "open", lambda cpus, folders, log: None)
    monkeypatch.setattr(subject.ray, "nodes", lambda: nodes(a=cpus))
    monkeypatch.setattr(subject.ray.util, "get_node_ip_address", lambda: "node-a")
    settings = WorkerSettings(partition="toy", parts={}, group_size=2, steps=1, seed=0, run_dir=None)
    with pytest.raises(GraphError if cpus == 4 else ZeroDivisionError):
        executor.start(toy.graph(), PLAN, settings, None)
    assert done == ([] if cpus == 4 else [3, "place"])
