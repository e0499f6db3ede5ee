"""A handwritten loop, the in-process executor and Ray with TransferQueue give the same losses and weights.

Bit for bit, and so does a run that was resumed halfway. The graph has seven stages: rollout, reward, logprobs of the
policy and of the frozen model, advantage, train with a KL term, refit.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from graphs import quickstart
from pipeline import Stage
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from stages import ClippedLoss, Dynamic, Evaluate, Packed, PrevLogprobs, RefLogprobs, Train
from tests.integration import handwritten
from tests.integration.same_settings import reverse_settings
from tests.journal.plugin import assert_sound

STEPS, PROMPTS, SAMPLES, MINIBATCHES, LR, WARM_STEPS, SEED, KL = 20, 8, 8, 2, 2e-3, 20, 3, 0.1


def described():
    """Return the quickstart's graph with the frozen model's logprobs and a KL term, without its evaluation."""
    graph = quickstart.graph(
        steps=STEPS,
        seed=SEED,
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
        lr=LR,
        minibatches=MINIBATCHES,
        warm_start_steps=WARM_STEPS,
        warm_start_until=1.0,
        threads=1,
    )
    stages: list[Stage] = []
    for stage in graph.stages:
        if isinstance(stage, Train):
            stage = replace(stage, loss=ClippedLoss(kl=KL))
        if not isinstance(stage, Evaluate):
            stages.append(stage)
        if isinstance(stage, PrevLogprobs):
            stages.append(RefLogprobs(stage.model.frozen(), on=stage.on))
    return replace(graph, stages=tuple(stages), schedule=replace(graph.schedule, checkpoint_every=STEPS // 2))


@pytest.fixture(scope="module")
def by_hand():
    torch.set_num_threads(1)
    return handwritten.run(
        reverse_settings(
            steps=STEPS,
            prompts=PROMPTS,
            samples=SAMPLES,
            minibatches=MINIBATCHES,
            lr=LR,
            warm_steps=WARM_STEPS,
            seed=SEED,
            kl=KL,
        )
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The complete run in this process."""
    run_dir = RunDir(tmp_path_factory.mktemp("whole") / "run")
    execute(LocalExecutor(), run_dir)
    assert_sound(run_dir.path)
    return run_dir


def cut(steps: int):
    """Return the same graph with three kinds of microbatches, for this number of steps."""
    graph, ways = described(), {Train: Packed(tokens=96), PrevLogprobs: Dynamic(tokens=128), RefLogprobs: 12}
    stages = [replace(s, microbatch=ways[type(s)]) if type(s) in ways else s for s in graph.stages]
    return replace(graph, stages=tuple(stages), schedule=replace(graph.schedule, steps=steps, checkpoint_every=0))


def execute(executor, run_dir: RunDir, start: int = 0, graph=None) -> Driver:
    graph = graph or described()
    driver = Driver(graph, plan(graph)[0], executor, run_dir=run_dir.create(), start=start)
    driver.execute()
    return driver


def losses(run_dir: RunDir) -> list[float]:
    lines = [msgspec.json.decode(line) for line in run_dir.metrics.read_bytes().splitlines()]
    return [line["train/loss"] for line in lines if line["step"] > 0]


def weights(run_dir: RunDir, steps: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(run_dir.checkpoint(steps) / "train" / "weights.safetensors")


def assert_same(run_dir: RunDir, expected) -> None:
    expected_losses, expected_weights = expected
    assert losses(run_dir) == expected_losses[-len(losses(run_dir)) :]
    found = weights(run_dir)
    assert found.keys() == expected_weights.keys()
    assert all(torch.equal(found[name], expected_weights[name]) for name in found)


def resumed(run_dir: RunDir, to: Path) -> RunDir:
    """Return a copy of a run as of its first checkpoint."""
    copy = RunDir(to).create()
    shutil.copytree(run_dir.checkpoint(STEPS // 2), copy.checkpoint(STEPS // 2))
    return copy


@pytest.mark.journal_expected("I8")  # continues in another folder, with the checkpoint but not the record
def test_local_equals_the_handwritten_loop_and_so_does_its_resumption(by_hand, local, tmp_path):
    run_dir = local
    assert len(losses(run_dir)) == STEPS
    assert_same(run_dir, by_hand)
    again = resumed(run_dir, tmp_path / "resumed")
    execute(LocalExecutor(), again, start=STEPS // 2)
    assert len(losses(again)) == STEPS // 2
    assert_same(again, by_hand)


def test_ray_and_transfer_queue_equal_the_handwritten_loop(by_hand, tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor

    run_dir = RunDir(tmp_path / "ray")
    driver = execute(RayExecutor(), run_dir)
    assert len(losses(run_dir)) == STEPS
    assert_same(run_dir, by_hand)
    events = [event for _, event in trace.read(run_dir.events)]
    published = [event for event in events if isinstance(event, trace.Published)]
    assert [event.version for event in published] == list(range(STEPS + 1))
    assert len({event.sha256 for event in published}) == STEPS + 1
    assert driver.loop.journal.weights == {STEPS: published[-1].sha256}
    assert [event.rows_left for event in events if isinstance(event, trace.Ended)] == [0]


@pytest.mark.journal_expected("I8")  # continues in another folder, with the checkpoint but not the record
def test_a_resumed_ray_run_equals_the_handwritten_loop(by_hand, local, tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor

    again = resumed(local, tmp_path / "resumed")
    execute(RayExecutor(), again, start=STEPS // 2)
    assert_same(again, by_hand)


def test_every_way_of_cutting_a_batch_is_the_same_in_memory_and_in_transfer_queue(tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor

    runs = [RunDir(tmp_path / name) for name in ("local", "ray")]
    for run_dir, executor in zip(runs, (LocalExecutor(), RayExecutor())):
        execute(executor, run_dir, graph=cut(steps=3))
    assert losses(runs[0]) == losses(runs[1])
    local, ray = (weights(run_dir, steps=3) for run_dir in runs)
    assert all(torch.equal(local[name], ray[name]) for name in local)
