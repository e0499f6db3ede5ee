"""The DAPO recipe: groups without spread are replaced, ratios are clipped, resuming and Ray change no bit."""

from __future__ import annotations

import shutil
from dataclasses import replace

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from graphs import dapo
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.record.checkpoint import Manifest
from pipeline.rundir import RunDir

STEPS, PROMPTS, SAMPLES = 6, 8, 8


def described(**options):
    graph = dapo.graph(
        steps=STEPS, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, evaluate_every=STEPS, threads=1, **options
    )
    return replace(graph, schedule=replace(graph.schedule, checkpoint_every=STEPS // 2))


def execute(executor, run_dir, start=0, **options):
    torch.set_num_threads(1)
    graph = described(**options)
    Driver(graph, plan(graph)[0], executor, run_dir=run_dir.create(), start=start).execute()
    return run_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return execute(LocalExecutor(), RunDir(tmp_path_factory.mktemp("dapo") / "run"))


def lines(run_dir):
    made = [msgspec.json.decode(line) for line in run_dir.metrics.read_bytes().splitlines()]
    return [line for line in made if line["step"] > 0]


def events(run_dir, kind):
    return [event for _, event in trace.read(run_dir.events) if isinstance(event, kind)]


def weights(run_dir):
    return load_file(run_dir.checkpoint(STEPS) / "train" / "weights.safetensors")


def check_batches(run_dir):
    """Check that every batch has the first kept groups, the other groups were recorded, and no rows are left."""
    dropped = {group for event in events(run_dir, trace.Dropped) for group in event.groups}
    admitted = {step: set() for step in range(STEPS)}
    for event in events(run_dir, trace.Admitted):
        admitted[event.step] |= set(event.groups)
    trained = {event.step: set(event.groups) for event in events(run_dir, trace.Ran) if event.stage == "train"}
    assert trained == {step: groups - dropped for step, groups in admitted.items()}
    assert {len(groups) for groups in trained.values()} == {PROMPTS}
    assert [event.rows_left for event in events(run_dir, trace.Ended)] == [0]
    for line in lines(run_dir):
        groups = admitted[line["step"] - 1]
        assert line["filter/admitted"] == len(groups)
        assert line["filter/dropped"] == len(groups & dropped)
        assert line["filter/acceptance"] == pytest.approx(PROMPTS / len(groups))
        assert line["advantage/zero_spread"] == 0
        assert 0 <= line["reward/exact_match"] <= 1
    assert any(line["filter/dropped"] for line in lines(run_dir))


def test_groups_without_spread_are_replaced(whole):
    check_batches(whole)
    reasons = {event.reason for event in events(whole, trace.Dropped)}
    assert "every reward_exact_match is 0" in reasons
    assert reasons <= {"every reward_exact_match is 0", "every reward_exact_match is 1"}


def test_several_updates_of_a_batch_make_clipping_happen(whole):
    assert any(line["train/clip_fraction"] > 0 for line in lines(whole))
    assert all(line["train/updates"] == 4 for line in lines(whole))
    assert any(line["train/ratio_max"] > 1.28 for line in lines(whole))


def test_the_mean_reward_is_that_of_all_sampled_groups(whole):
    """Recomputed from the spans of the reward's tasks."""
    for line in lines(whole):
        spans = [
            event for event in events(whole, trace.Ran) if (event.stage, event.step) == ("reward", line["step"] - 1)
        ]
        seen = sum(len(span.groups) for span in spans)
        mean = sum(len(span.groups) * span.metrics["reward/mean"] for span in spans) / seen
        assert seen == line["filter/admitted"]
        assert line["reward/mean"] == pytest.approx(mean)


@pytest.mark.journal_expected("I8")  # continues in another folder, with the checkpoint but not the record
def test_a_resumed_run_ends_with_the_same_weights(whole, tmp_path):
    half = whole.checkpoint(STEPS // 2)
    again = RunDir(tmp_path / "again").create()
    shutil.copytree(half, again.checkpoint(STEPS // 2))
    manifest = msgspec.json.decode((half / "manifest.json").read_bytes(), type=Manifest)
    sampled = [group for event in events(whole, trace.Admitted) if event.step < STEPS // 2 for group in event.groups]
    assert manifest.next_group == max(sampled) + 1 > STEPS // 2 * PROMPTS, "the test drops groups before the checkpoint"
    execute(LocalExecutor(), again, start=STEPS // 2)
    names = ("filter/admitted", "reward/mean", "train/loss", "train/clip_fraction")
    told = [[line[name] for name in names] for line in lines(whole)]
    assert [[line[name] for name in names] for line in lines(again)] == told[STEPS // 2 :]
    expected, found = weights(whole), weights(again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_ahead_of_the_weights_the_same_rules_hold(tmp_path):
    """A batch is the first groups in order that are kept, though more than one is being sampled."""
    run_dir = execute(LocalExecutor(), RunDir(tmp_path / "run"), max_staleness=1)
    dropped = {group for event in events(run_dir, trace.Dropped) for group in event.groups}
    kept = sorted({group for event in events(run_dir, trace.Admitted) for group in event.groups} - dropped)
    trained = {event.step: sorted(event.groups) for event in events(run_dir, trace.Ran) if event.stage == "train"}
    assert trained == {step: kept[step * PROMPTS : (step + 1) * PROMPTS] for step in range(STEPS)}
    assert len(kept) == STEPS * PROMPTS, "no more are sampled"
    assert sum(line["filter/dropped"] for line in lines(run_dir)) == len(dropped) > 0
    for line in lines(run_dir):
        assert line["filter/admitted"] == PROMPTS + line["filter/dropped"]
        assert line["filter/acceptance"] == pytest.approx(PROMPTS / line["filter/admitted"])
        assert line["advantage/zero_spread"] == 0
    ages = [line["train/staleness_max"] for line in lines(run_dir)]
    assert max(ages) == 1
    assert all("train/is_weight" in line for line in lines(run_dir))
    assert any(line["train/clip_fraction"] > 0 for line in lines(run_dir))


@pytest.mark.search  # runs on Ray are those of one process: test_parity
def test_on_ray_the_weights_are_the_same(whole, tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor

    run_dir = execute(RayExecutor(), RunDir(tmp_path / "ray"))
    check_batches(run_dir)
    expected, found = weights(whole), weights(run_dir)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
