"""Worker groups on the same GPUs take turns under every schedule and hand their memory to each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import quickstart
from pipeline import Graph, Model, Schedule, WorkerGroup
from pipeline.engine.driver import Driver
from pipeline.errors import GraphError
from pipeline.executors.local import LocalExecutor
from pipeline.executors.turns import SLACK_BYTES, Turns
from pipeline.plan.planner import plan
from pipeline.plan.resting import resting_bytes
from pipeline.record import trace
from pipeline.rundir import RunDir
from pipeline.simulation.distributions import parse
from pipeline.simulation.durations import Costs, Drawn, Durations
from pipeline.simulation.virtual_run import Fault, Simulation
from stages import PrevLogprobs, Refit, RefLogprobs, Rollout, Train
from stages.backends import Optimization, device, trainer
from stages.backends.device import Parking
from stages.backends.torch.engine import TorchEngine
from tests.examples import few
from tests.journal.checker import check
from tests.unit import toy
from tests.unit.tiny import QWEN3

FAST: dict[str, Any] = {
    "steps": 3, "evaluate_every": 2, "warm_start_steps": 5, "prompts_per_step": 4, "samples_per_prompt": 4,
    "threads": 1,
}  # fmt: skip


def colocated(graph: Graph) -> Graph:
    """Return the graph with its learner on the sampler's GPUs."""
    sampler = next(stage.target for stage in graph.stages if isinstance(stage, Refit))
    learner = replace(next(stage.on for stage in graph.stages if isinstance(stage, Train)), colocated=sampler)
    moved = [
        replace(stage, source=learner) if isinstance(stage, Refit)
        else replace(stage, on=learner) if isinstance(stage, PrevLogprobs | RefLogprobs | Train)
        else stage
        for stage in graph.stages
    ]  # fmt: skip
    return replace(graph, stages=tuple(moved))


def toys(replicas: int, batch: int, steps: int, **changes: Any) -> Graph:
    """Return the toy graph with sampler, learner and reward all on the same GPUs."""
    sampler = WorkerGroup("sampler", backend="torch", workers=replicas)
    learner, judge = (WorkerGroup(name, backend="torch", colocated=sampler) for name in ("learner", "judge"))
    on = dict(on=learner)
    streams = toy.streaming(sampler=replicas, **changes)
    homes = {"logprobs": on, "ref": on, "train": on, "refit": dict(on=learner, to=sampler), "reward": dict(on=judge)}
    given = {name: (streams.get(name) or {}) | homes.get(name, {}) for name in {*streams, *homes}}
    return toy.graph(batch=batch, schedule=Schedule(steps=steps), **given)


@given(
    seed=st.integers(0, 10_000),
    replicas=st.sampled_from([1, 2]),
    refit=st.sampled_from(["drain", "in_flight"]),
    runs=st.sampled_from([None, 1, 2]),
    failing=st.booleans(),
)
@settings(deadline=None, max_examples=few(60))
def test_groups_on_the_same_gpus_never_run_at_once(seed, replicas, refit, runs, failing):
    graph = toys(replicas, 4, 4, run_groups=runs)
    graph = replace(graph, schedule=replace(graph.schedule, refit=refit))
    planned = plan(graph)[0]
    seconds = {stage.name: Drawn(parse("lognormal(1.0, 1.0)")) for stage in planned.stages}
    lost = iter([True, False, True] * failing)
    simulation = Simulation(
        planned, Durations(seconds, Costs()), seed=seed,
        faults=lambda task: Fault(kind="before_put") if task.stage == "rollout" and next(lost, False) else None,
    )  # fmt: skip
    events = simulation.run()
    spans = [(event.start_s, event.end_s, event.group) for event in events if isinstance(event, trace.Ran)]
    spans = [span for span in spans if span[2] in ("sampler", "learner", "judge")]
    assert {group for *_, group in spans} == {"sampler", "learner", "judge"}
    transfers = {
        (event.start_s, event.end_s) for event in events if isinstance(event, trace.Ran) and event.stage == "refit"
    }
    for start_s, end_s, group in spans:
        for other_start_s, other_end_s, other in spans:
            if other != group and not {(start_s, end_s), (other_start_s, other_end_s)} & transfers:
                assert end_s <= other_start_s or other_end_s <= start_s


def test_turns_wake_and_put_to_sleep_once():
    made: list[tuple[str, bool]] = []

    def call(name: str, awake: bool, room: int | None) -> list[trace.Turned]:
        assert room is None, "nothing is known of what any of them takes"
        made.append((name, awake))
        return [trace.Turned(group=name, worker=0, awake=awake, memory_bytes=0, start_s=0.0, end_s=1.0)]

    planned = plan(toys(1, 4, 1))[0]
    turns = Turns(planned, call)
    for name in ("prompts", "refit", "rollout", "logprobs", "samples", "reward", "train", "evaluate"):
        turns.before(planned.stage(name))
    assert made == [
        ("judge", False), ("learner", False),
        ("sampler", False), ("learner", True),
        ("learner", False), ("sampler", True),
    ], "rewards are no models here"  # fmt: skip
    assert [(event.group, event.awake) for event in turns.taken()] == made and turns.taken() == []


def test_a_partner_keeps_what_an_engine_of_fixed_memory_does_not_take():
    wanted: list[tuple[str, int | None]] = []
    given = {"sampler": 80, "learner": 40}

    def call(name: str, awake: bool, room: int | None) -> list[trace.Turned]:
        if not awake:
            wanted.append((name, room))
        before, after = (10, 10 + given[name]) if awake else (10 + given[name], 10)
        return [
            trace.Turned(
                group=name, worker=worker, awake=awake, before_bytes=before - worker, memory_bytes=after,
                start_s=0.0, end_s=1.0,
            )
            for worker in range(2)
        ]  # fmt: skip

    sampler = WorkerGroup("sampler", backend="vllm")
    learner = WorkerGroup("learner", backend="torch", colocated=sampler)
    graph = toy.graph(
        schedule=Schedule(steps=1), refit=dict(on=learner, to=sampler),
        **{name: dict(on=learner) for name in ("logprobs", "ref", "train")},
        **{name: dict(on=sampler) for name in ("rollout", "evaluate")},
    )  # fmt: skip
    planned = plan(graph)[0]
    turns = Turns(planned, call)
    for _ in range(2):
        for name in ("refit", "rollout", "train"):
            turns.before(planned.stage(name))
    assert wanted == [("learner", None), ("sampler", None), ("learner", 80 + SLACK_BYTES), ("sampler", None)]


def run(graph: Graph, folder: Path, executor: Any) -> list[trace.TraceEvent]:
    run_dir = RunDir(folder).create()
    Driver(graph, plan(graph)[0], executor, run_dir=run_dir).execute()
    assert not check(run_dir.path)
    return [event for _, event in trace.read(run_dir.events)]


def published(events: list[trace.TraceEvent]) -> list[str]:
    return [event.sha256 for event in events if isinstance(event, trace.Published)]


def test_a_run_in_turns_is_the_run_side_by_side(tmp_path, monkeypatch):
    loads, beside, setup = [], [], Rollout.setup

    def noted(stage, context):
        beside.append((context.in_turns, context.beside_bytes))
        return setup(stage, context)

    monkeypatch.setattr(Rollout, "setup", noted)
    monkeypatch.setattr(TorchEngine, "load", lambda engine, model: loads.append(model))
    apart = run(quickstart.graph(**FAST), tmp_path / "apart", LocalExecutor())
    assert len(loads) == 1, "the sampler's model loads while the learner's does"
    together = run(colocated(quickstart.graph(**FAST)), tmp_path / "together", LocalExecutor())
    assert len(loads) == 1, "it loads in its turn"
    copy = resting_bytes(colocated(quickstart.graph(**FAST)), ["learner"])
    assert beside == [(False, 0), (True, copy)] and copy > 0, "the learner's copy for refits stays"
    assert published(together) == published(apart)
    turned = [(event.group, event.awake) for event in together if isinstance(event, trace.Turned)]
    assert turned[:3] == [("learner", False), ("sampler", False), ("learner", True)]
    for first, second in zip(turned[1::2], turned[2::2]):
        assert (first[1], second[1]) == (False, True) and first[0] != second[0]


@pytest.mark.parametrize("shared", [False, True])
def test_parked_tensors_are_the_same_objects_and_come_back(shared):
    parking = Parking(torch.device("cpu"))
    tensors = [torch.arange(4.0), torch.ones(2, 3, dtype=torch.bfloat16)]
    wanted, addresses = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    for _ in range(2):
        parking.park(tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted))
        assert all(tensor.data_ptr() != address for tensor, address in zip(tensors, addresses))
        if shared:  # changes to parked tensors persist
            tensors[0].add_(1)
            wanted[0].add_(1)
        parking.leave()
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted))


def test_a_learner_that_sleeps_whole_releases_unused_memory_once_it_has_parked(monkeypatch):
    """The engine that starts beside it counts what is free. Asked for room, `Parking` releases while it counts."""
    done: list[str] = []
    engine = TorchEngine(torch.device("cpu"), torch.float32)
    engine.learner(Model("tiny", config=QWEN3, alphabet="0123456789"), Optimization(lr=1.0))
    monkeypatch.setattr(Parking, "park", lambda *_, **settings: done.append("parked"))
    monkeypatch.setattr(trainer, "release_unused", lambda device: done.append("released"))
    engine.sleep()
    assert done.index("released") == len(done) - 1 > 0
    done.clear()
    engine.sleep(1)
    assert set(done) == {"parked"}


def test_parked_tensors_share_blocks(monkeypatch):
    monkeypatch.setattr(device, "_BLOCK_BYTES", 2048)
    parking, sizes = Parking(torch.device("cpu")), [(300,), (), (0, 3), (17, 5), (2000,), (1,)]
    kinds = [torch.bfloat16, torch.float32, torch.int64, torch.float64, torch.float32, torch.uint8]
    tensors = [torch.full(size, 7 + i, dtype=kind) for i, (size, kind) in enumerate(zip(sizes, kinds))]
    wanted = [tensor.clone() for tensor in tensors]
    parking.park(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, wanted))
    for i, tensor in enumerate(tensors):  # no two tensors share bytes
        tensor.fill_(20 + i)
    assert all((tensor == 20 + i).all() for i, tensor in enumerate(tensors))
    blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sorted(blocks.values()) == [512, 1024, 1536, 8192]


def wrong(sampler: WorkerGroup, learner: WorkerGroup, **schedule: Any) -> list[str]:
    graph = toy.graph(
        schedule=Schedule(steps=2, **schedule),
        **{name: dict(on=learner) for name in ("logprobs", "train")},
        rollout=dict(on=sampler), evaluate=dict(on=sampler), refit=dict(on=learner, to=sampler),
    )  # fmt: skip
    try:
        plan(graph, gpus=1)
    except GraphError as error:
        return [problem.what for problem in error.problems]
    return []


def test_what_cannot_be_colocated_is_refused():
    sampler = WorkerGroup("sampler", backend="torch", gpus=1)
    learner = WorkerGroup("learner", backend="torch", gpus=1, colocated=sampler)
    assert wrong(sampler, learner) == [], "one GPU is enough"
    assert wrong(sampler, replace(learner, colocated=None)) == [
        "the worker groups ask for 2 GPUs (sampler 1, learner 1), 1 available"
    ]
    said = "worker group 'learner' has colocated='sampler'"
    assert wrong(sampler, replace(learner, gpus=0)) == [f"{said} and 0 GPUs; that group has 1"]
    other = WorkerGroup("other", backend="torch", gpus=1)
    assert wrong(sampler, replace(learner, colocated=other)) == [
        "worker group 'learner' has colocated='other', which runs no stage with a model"
    ]
    assert wrong(replace(sampler, colocated=learner), learner)[0].endswith("which itself is colocated")
    assert any("max_staleness=1" in what for what in wrong(sampler, learner, max_staleness=1))
    assert wrong(sampler, replace(learner, colocated="sampler")) == [said]  # type: ignore[arg-type]
