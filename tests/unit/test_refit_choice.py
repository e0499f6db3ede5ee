"""Which transport a refit uses, and when a run reports that it cannot use one."""

from dataclasses import replace

import pytest

from graphs.quickstart import graph
from ops.refit.transports import P2P, TRANSPORTS, Broadcast
from pipeline import Model, StageError, WorkerGroup
from stages import Refit
from stages import refit as module
from stages.backends import Route
from stages.backends.vllm.weights import VersionShares, route_from

TOGETHER = {"gloo", "p2p", "broadcast", "tree"}
POLICY = Model("tiny")
CPU = {name: WorkerGroup(name, backend="torch") for name in ("source", "target")}
GPU = {name: replace(group, gpus=1) for name, group in CPU.items()}
SHARED = {**GPU, "source": replace(GPU["source"], colocated=GPU["target"])}


@pytest.mark.parametrize(
    ("groups", "far"),
    [(CPU, "gloo"), (GPU, "p2p"), (SHARED, "messages")],
)
def test_on_one_machine_it_is_pulled_and_between_machines_sent(groups: dict[str, WorkerGroup], far: str) -> None:
    refit = Refit(POLICY, **groups)
    assert (refit.path(True).name, refit.path(False).name) == ("pull", far)
    assert (refit.meets(True), refit.meets(False)) == (False, far in ("gloo", "p2p"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flag_decides_and_a_pull_between_machines_is_refused(transport: str) -> None:
    refit = Refit(POLICY, **CPU, transport=transport)
    assert refit.path(True) is TRANSPORTS[transport] and refit.meets(True) == (transport in TOGETHER)
    if transport == "pull":
        with pytest.raises(StageError, match="has transport='pull' and workers on several machines; this transport"):
            refit.meets(False)
    else:
        assert refit.meets(False) == refit.meets(True)


def test_sizes_reach_the_ranks_of_an_engine_that_knows_transports_by_name() -> None:
    for transport in (P2P(slot_bytes=64 << 20), Broadcast(buckets=4), TRANSPORTS["gloo"]):
        assert Refit(POLICY, **CPU, transport=transport).path(True) == transport
        sent = VersionShares([], 1, Route(transport)).plain()["transport"]
        assert route_from(sent, None).transport == transport and isinstance(sent, str) == (transport.name == "gloo")
    assert P2P(slot_bytes=64 << 20) != P2P()


def test_a_recipe_hands_its_flag_on() -> None:
    (refit,) = (stage for stage in graph(refit_transport="tree").stages if isinstance(stage, Refit))
    assert refit.transport == "tree"


@pytest.mark.parametrize("transport", ["p2p", "broadcast"])
def test_nccl_needs_its_package(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, told in ((True, []), (False, ["it needs the package nccl4py, which is not installed"])):
        monkeypatch.setattr(module, "is_installed", lambda package: installed)  # noqa: B023
        assert [why for why, _ in Refit(POLICY, **GPU, transport=transport)._objections()] == told
    assert not list(Refit(POLICY, **CPU, transport="broadcast")._objections()), "between CPUs gloo carries it"


def test_auto_warns_of_a_missing_package_that_only_several_machines_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_installed", lambda package: package != module.NCCL)
    for groups, told in ((GPU, True), (CPU, False), (SHARED, False)):
        found = [problem for problem in Refit(POLICY, **groups).check(None) if "transport='auto'" in problem.what]  # type: ignore[arg-type]
        assert [(problem.warning, problem.fix) for problem in found] == [
            (True, "pip install 'sluice-rl[nccl]', or keep both worker groups on one machine")
        ] * told
