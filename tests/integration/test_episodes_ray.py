"""Episodes on Ray and TransferQueue: the bits of a run in this process, several workers of each kind, runs ahead."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline import Graph, Schedule
from pipeline.record import trace
from stages import Filter
from tests.unit.environments import Echo, Faulty, Uneven
from tests.unit.test_episode import execute, published, run_graph
from tests.unit.test_episodes_ahead import ages, ahead, assert_closed
from tests.unit.test_open_episodes import Held, why
from tests.waiting import until

torch.set_num_threads(1)


def workers(graph: Graph, count: int) -> Graph:
    """The graph with that many workers that sample, and that train."""
    stages = []
    for stage in graph.stages:
        groups = {name: getattr(stage, name, None) for name in ("on", "source", "target")}
        more = {name: replace(group, workers=count, cpus=0.25) for name, group in groups.items() if group}
        stages.append(replace(stage, **more))
    return replace(graph, stages=tuple(stages))


def of_kind(events: list[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_run_on_ray_is_that_of_one_process(tmp_path: Path, ray_session: Any) -> None:
    from pipeline.executors.ray import RayExecutor

    runs = [execute(tmp_path / "local", run_graph(Echo())), execute(tmp_path / "ray", run_graph(Echo()), RayExecutor())]
    assert published(runs[0]) == published(runs[1]) and len(published(runs[0])) == 3


def test_a_view_counts_the_open_episodes_of_all_workers(tmp_path: Path, ray_session: Any) -> None:
    """Each of two has 4 that are held until the view has said so."""
    from pipeline.executors.ray import RayExecutor

    gate, folder, said = tmp_path / "gate", tmp_path / "run", []

    def watch() -> None:
        try:
            said.append(until(lambda: "8 of 8" in (text := why(folder)) and text, 120.0))
        finally:
            gate.touch()

    watching = threading.Thread(target=watch)
    watching.start()
    execute(folder, workers(run_graph(Held(str(gate)), steps=1), 2), RayExecutor())
    watching.join()
    assert said == ["8 of 8 episodes wait for their environment"] and why(folder) == "done"


def differing(response: list[str]) -> bool:
    """A rule for groups."""
    return response[0][:1] != response[1][:1]


def test_two_samplers_and_two_ranks_with_a_rule_while_batches_wait(tmp_path: Path, ray_session: Any) -> None:
    """Lost groups are dropped before the rule is asked. The next batch is sampled while this one is trained."""
    from pipeline.executors.ray import RayExecutor

    environment = Faulty(method="open", mark=str(tmp_path / "mark"), of="r4", sleep_s=0.1)
    graph = ahead(environment, Schedule(steps=4, max_staleness=1, refit="in_flight"), retries=0)
    rule = Filter(differing, episodes=True, lost=0.6)
    stages = tuple(rule if isinstance(stage, Filter) else stage for stage in graph.stages)
    events = execute(tmp_path / "run", workers(replace(graph, stages=stages), 2), RayExecutor())
    reasons = {event.reason for event in of_kind(events, trace.Dropped)}
    assert reasons == {"lost:open:OSError", "differing() is False"}
    asked = [event for event in of_kind(events, trace.Submitted) if event.stage == "episode"]
    assert {event.replica for event in asked} == {0, 1}
    assert {event.worker for event in of_kind(events, trace.Trained)} == {0, 1}
    assert max(ages(events)) == 1


def test_slow_episodes_are_given_up_on_ray(tmp_path: Path, ray_session: Any) -> None:
    from pipeline.executors.ray import RayExecutor

    environment = Uneven(sleep_s=0.1, of="r42", slow_s=60.0, log=str(tmp_path / "log"))
    schedule = Schedule(steps=5, max_staleness=2, on_stale="drop", refit="in_flight")
    events = execute(tmp_path / "run", workers(ahead(environment, schedule), 2), RayExecutor())
    assert 0 < max(ages(events)) <= 2
    dropped = {group: event.reason for event in of_kind(events, trace.Dropped) for group in event.groups}
    assert dropped[4] == "cancelled"
    assert_closed(tmp_path / "log")
