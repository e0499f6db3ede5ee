"""Whole runs on Ray that sample with vLLM and train with Megatron-core, including runs whose workers are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.load import load
from pipeline.engine.driver import Driver
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.integration.test_async import QUICKSTART, events, lines
from tests.integration.test_lost_workers import in_command, killed, pids
from tests.journal.checker import check
from tests.optional import need

need("megatron", "megatron.core")

SMALL: dict[str, Any] = {"warm_start_steps": 20, "prompts_per_step": 8, "samples_per_prompt": 4, "threads": 1}


def run(folder: Path, file: Path, flags: dict[str, Any], on_step: Any = None) -> RunDir:
    from pipeline.executors.ray import RayExecutor

    graph = load(file).build(flags)
    run_dir = RunDir(folder).create()
    Driver(graph, plan(graph)[0], RayExecutor(), run_dir=run_dir, on_step=on_step).execute()
    return run_dir


@pytest.mark.timeout(600)
def test_the_quickstart_learns_with_both_engines_and_a_sampler_that_dies(tmp_path, ray_session):
    need("vllm", "vllm")
    folder = tmp_path / "run"
    flags = {"generator": "vllm", "trainer": "megatron", "steps": 16, "evaluate_every": 16, "threads": 1, "seed": 1}
    run_dir = run(folder, QUICKSTART, flags, on_step=killed(folder, "sampler", {6}))
    made = lines(run_dir)
    assert [line["step"] for line in made] == list(range(1, 17))
    assert made[-1]["reward/mean"] > made[0]["reward/mean"] + 0.15 and made[-1]["eval/exact_match"] > 0.7
    # vLLM and Megatron-core agree on the logprob of every sampled token, after every refit.
    assert max(line["train/mismatch_ratio_max"] for line in made) < 1 + 1e-4
    assert max(abs(line["train/mismatch_kl"]) for line in made) < 1e-5
    assert {event.reason for event in events(run_dir, trace.Retried)} == {"worker sampler.0 died"}
    assert len({event.sha256 for event in events(run_dir, trace.Published)}) == 17
    assert not check(run_dir.path)


COLOCATED = """
from unittest.mock import patch
from graphs import quickstart
from pipeline import Graph
from tests.unit.environments import Echo, with_episodes
from tests.unit.test_colocated import colocated

MIXTURE = quickstart.TINY_QWEN3 | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                                   "moe_intermediate_size": 32, "norm_topk_prob": True}

def graph(steps: int = 2) -> Graph:
    with patch.object(quickstart, "TINY_QWEN3", MIXTURE):
        made = quickstart.graph(steps=steps, evaluate_every=2, warm_start_steps=20, prompts_per_step=8,
                                samples_per_prompt=4, threads=1, generator="vllm", trainer="megatron")
    return with_episodes(colocated(made), Echo(), turns=3, tokens=30, turn_tokens=6, environments=1)
"""
TWO_RANKS = """
from dataclasses import replace
from graphs import quickstart
from pipeline import Graph, WorkerGroup
from stages import PrevLogprobs, Refit, Train
from tests.unit.environments import Echo, with_episodes

def graph(every: int = 3) -> Graph:
    made = quickstart.graph(steps=7, evaluate_every=7, warm_start_steps=20, prompts_per_step=8, samples_per_prompt=4,
                            threads=1, trainer="megatron")
    learner = WorkerGroup("learner", backend="megatron", workers=2, tensor_parallel=2, threads=1)
    stages = [replace(s, source=learner) if isinstance(s, Refit) else
              replace(s, on=learner) if isinstance(s, (PrevLogprobs, Train)) else s for s in made.stages]
    made = replace(made, stages=tuple(stages), schedule=replace(made.schedule, checkpoint_every=every))
    return with_episodes(made, Echo(), turns=3, tokens=30, turn_tokens=6, environments=1)
"""


@pytest.mark.timeout(600)
def test_both_engines_take_turns_where_they_are_colocated_on_episodes_of_a_mixture_of_experts(tmp_path, ray_session):
    need("vllm", "vllm")
    file = tmp_path / "together.py"
    file.write_text(COLOCATED)
    run_dir = run(tmp_path / "run", file, {})
    assert [line["episode/turns"] for line in lines(run_dir)] == [3.0, 3.0]
    assert max(line["train/mismatch_ratio_max"] for line in lines(run_dir)) < 1 + 1e-4
    turned = [(event.group, event.awake) for event in events(run_dir, trace.Turned)]
    assert turned[:3] == [("learner", False), ("sampler", False), ("learner", True)]
    assert {first[0] != second[0] for first, second in zip(turned[1::2], turned[2::2])} == {True}
    spans = [event for event in events(run_dir, trace.Ran) if event.group in ("sampler", "learner")]
    apart = [(one.start_s, one.end_s, one.group) for one in spans if one.stage != "refit"]
    for start_s, end_s, group in apart:
        assert all(end_s <= other[0] or other[1] <= start_s for other in apart if other[2] != group)
    assert not check(run_dir.path)


@pytest.mark.timeout(600)
def test_a_trainer_of_two_ranks_that_loses_one_goes_back_to_its_checkpoint(tmp_path, ray_session, monkeypatch, capsys):
    file, folder = tmp_path / "two.py", tmp_path / "run"
    file.write_text(TWO_RANKS)
    died: list[int] = []

    def kill_once(step: int, metrics: dict[str, float]) -> None:
        if step == 4 and not died:
            died.append(pids(folder, "learner")[-1])
            os.kill(died[0], signal.SIGKILL)

    assert in_command(file, folder, monkeypatch, kill_once) == 0
    assert "restart from step 3; restarts left: 1" in capsys.readouterr().err
    run_dir = RunDir(folder)
    assert [event.start for event in events(run_dir, trace.Started)] == [0, 3]
    published = [(event.version, event.sha256) for event in events(run_dir, trace.Published)]
    assert [version for version, _ in published].count(4) == 2, "before the loss and after it"
    assert len(set(published)) == len(dict(published)) == 8, "trained again it is the same"
    assert [(line["step"], line["episode/turns"]) for line in lines(run_dir)] == [(n, 3.0) for n in range(1, 8)]
    assert not check(run_dir.path)
