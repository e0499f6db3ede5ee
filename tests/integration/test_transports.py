"""Whole runs with each transport: the same weights, refit records, and workers that die during a refit."""

from pathlib import Path
from typing import Any

import pytest

from ops.comm.stateless_group import GroupError
from ops.refit.transports.meeting import Meeting
from pipeline.cli.load import load
from pipeline.errors import WorkerLost
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.integration.test_async import events, execute, lines, weights
from tests.journal.checker import check

GRAPH = Path(__file__).parent / "transport_graph.py"
TOGETHER = ("gloo", "broadcast", "tree")


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run in this process with the default transport."""
    return execute(GRAPH, {}, tmp_path_factory.mktemp("pulled") / "run")


def refits(run_dir: RunDir) -> list[dict[str, float]]:
    """Return the refit metrics of each step, without the stage's name."""
    return [
        {name.removeprefix("refit/"): value for name, value in line.items() if name.startswith("refit/")}
        for line in lines(run_dir)
    ]


def published(run_dir: RunDir) -> list[tuple[int, str]]:
    return [(event.version, event.sha256) for event in events(run_dir, trace.Published)]


def on_ray(flags: dict[str, Any], folder: Path) -> RunDir:
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    return execute(GRAPH, flags, folder, RayExecutor(modules=user_modules(load(GRAPH).module)))


@pytest.mark.parametrize("transport", ["golden", "messages", *TOGETHER])
def test_every_transport_brings_the_weights_that_are_pulled(tmp_path, pulled, transport):
    run_dir = execute(GRAPH, {"transport": transport}, tmp_path / "run")
    assert published(run_dir) == published(pulled) and weights(run_dir, 3) == weights(pulled, 3)
    for record, other in zip(refits(run_dir), refits(pulled), strict=True):
        assert record[f"path_{transport}"] == other["path_pull"] == 1.0
        assert record["received_bytes"] == other["received_bytes"] == record["size_bytes"]
        sizes = [record[f"{what}_bytes_{side}"] for side in ("source", "target") for what in ("kept", "peak")]
        assert record["size_bytes"] < sizes[0] <= sizes[1] and sizes[2] <= sizes[3]
        assert (sizes[2] > 0) == (transport in TOGETHER) and other["kept_bytes_target"] == 0
        parts = {name for name in record if name.endswith("_ms")}
        assert parts >= {"offer_ms", "move_ms", "check_ms"} and all(record[part] >= 0 for part in parts)
        assert (parts >= {"meet_ms", "plan_ms", "carry_ms"}) == (transport in TOGETHER)
    assert refits(run_dir)[-1]["lookups"] == 0
    spans = [event for event in events(run_dir, trace.Ran) if event.stage == "refit"]
    assert {event.group for event in spans} == {"learner", "sampler"} and len(spans) == 2 * 4
    for line in lines(run_dir):
        own = [event for event in spans if event.step + 1 == line["step"]]
        begun_s, ended_s = min(event.start_s for event in own), max(event.end_s for event in own)
        assert line["time/refit_s"] <= ended_s - begun_s + 1e-6, "time that both sides share counts once"
    assert not check(run_dir.path)


IN_PLACE = """
from dataclasses import replace
from ops.refit.transports import Gloo
from pipeline import Graph
from stages import Refit
from tests.integration import transport_graph

def graph() -> Graph:
    made = transport_graph.graph()
    without = {"transport": Gloo(keep_copy=False)}
    return replace(made, stages=tuple(replace(s, **without) if isinstance(s, Refit) else s for s in made.stages))
"""


def test_without_a_copy_of_the_weights_the_same_arrive(tmp_path, pulled):
    file = tmp_path / "in_place.py"
    file.write_text(IN_PLACE)
    run_dir = execute(file, {}, tmp_path / "run")
    assert published(run_dir) == published(pulled) and weights(run_dir, 3) == weights(pulled, 3)
    for record, other in zip(refits(run_dir), refits(pulled), strict=True):
        assert record["kept_bytes_source"] == record["kept_bytes_target"], "only the messages"
        assert record["kept_bytes_source"] < 1.1 * record["size_bytes"] < other["kept_bytes_source"] / 1.8


def test_a_version_that_does_not_get_through_though_nobody_died_ends_the_run(tmp_path, monkeypatch):
    carry = Meeting.carry

    def fails(self: Meeting, version: int, *given: Any, **named: Any) -> Any:
        if self.receives and version == 1:
            raise GroupError("the cable is out")
        return carry(self, version, *given, **named)

    monkeypatch.setattr(Meeting, "carry", fails)
    with pytest.raises(WorkerLost, match=r"did not reach all workers: .*the cable is out.*no worker died"):
        execute(GRAPH, {"transport": "gloo"}, tmp_path / "run")


def test_between_machines_it_is_gloo_and_a_sampler_that_dies_in_it_changes_nothing(
    tmp_path, ray_session, pulled, monkeypatch
):
    """It dies once before it meets the trainer, and once while a message arrives."""
    from pipeline.executors.actor_groups import ActorGroups

    monkeypatch.setattr(ActorGroups, "are_near", lambda self, names: False)
    flags = {"workers": 2, "dies": True, "done": str(tmp_path / "done")}
    run_dir = on_ray(flags, tmp_path / "run")
    placed = [event.worker for event in events(run_dir, trace.Placed) if event.group == "sampler"]
    assert placed == [0, 1, 0, 0]
    retried = events(run_dir, trace.Retried)
    assert [(event.stage, event.step) for event in retried] == [("refit", 0), ("refit", 1)]
    assert {event.reason for event in retried} == {"worker sampler.0 died"}
    assert all(record["path_gloo"] == 1.0 for record in refits(run_dir))
    assert published(run_dir) == published(pulled) and weights(run_dir, 3) == weights(pulled, 3)
    assert not check(run_dir.path)
