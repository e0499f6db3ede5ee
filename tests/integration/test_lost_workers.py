"""Workers that are killed during a run: a sampler is replaced and nothing changes, a trainer goes back to a checkpoint.

The record of every run here is judged by tests/journal, which knows attempts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.load import load
from pipeline.errors import StageError, WorkerLost
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.integration.test_async import FAST, NUMBERS, QUICKSTART, SLOW_TAIL, events, execute, lines, weights
from tests.journal.checker import check

FLAGS: dict[str, Any] = {"steps": 8, "evaluate_every": 8, **FAST}


def killed(run_dir: Path, group: str, steps: set[int]) -> Callable[[int, dict[str, float]], None]:
    """Kills the worker that a group has just then, after each of these steps."""

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step in steps:
            os.kill(pids(run_dir, group)[-1], signal.SIGKILL)

    return on_step


def pids(run_dir: Path, group: str) -> list[int]:
    """The processes of a group so far; the last one is there now."""
    return [event.pid for event in events(RunDir(run_dir), trace.Placed) if event.group == group]


@pytest.mark.parametrize("flags", [{}, {"max_staleness": 1}], ids=["synchronous", "ahead"])
def test_a_sampler_that_dies_is_replaced_and_its_samples_are_made_again(tmp_path, ray_session, undisturbed, flags):
    from pipeline.executors.ray import RayExecutor

    folder = tmp_path / "run"
    run_dir = execute(QUICKSTART, FLAGS | flags, folder, RayExecutor(), on_step=killed(folder, "sampler", {1, 4}))
    placed = pids(folder, "sampler")
    assert len(placed) == len(set(placed)) == 3
    retried = events(run_dir, trace.Retried)
    assert retried and {event.reason for event in retried} == {"worker sampler.0 died"}
    if not flags:  # running ahead, a second attempt may sample with newer weights than the first
        assert weights(run_dir, 8) == undisturbed
    assert [line["step"] for line in lines(run_dir)] == list(range(1, 9))
    assert not check(run_dir.path)


def test_streams_that_die_are_begun_again_and_slow_groups_still_dropped(tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor, user_modules

    flags = {"steps": 25, "max_staleness": 1, "on_stale": "drop", "refit": "in_flight", **SLOW_TAIL}
    folder = tmp_path / "run"
    executor = RayExecutor(modules=user_modules(load(NUMBERS).module))
    run_dir = execute(NUMBERS, flags, folder, executor, on_step=killed(folder, "sampler", {5, 12}))
    assert any(event.stage == "sample" for event in events(run_dir, trace.Retried))
    assert any(event.attempt == 1 for event in events(run_dir, trace.Put))
    assert events(run_dir, trace.Ended)[0].rows_left == 0
    assert not check(run_dir.path)


def test_a_group_whose_workers_keep_dying_ends_the_run(tmp_path, ray_session, monkeypatch):
    from pipeline.executors import ray as executors

    monkeypatch.setattr(executors, "RESTARTS", 1)
    folder = tmp_path / "run"
    with pytest.raises(StageError, match=r"a worker died and did not .*; 1 others died before it"):
        execute(QUICKSTART, FLAGS, folder, executors.RayExecutor(), on_step=killed(folder, "sampler", {1, 3}))


def test_a_trainer_that_dies_ends_the_run_with_its_own_error(tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor

    folder = tmp_path / "run"
    with pytest.raises(WorkerLost, match=r"a worker died and did not finish '.*' at step 4 on 'learner'"):
        execute(QUICKSTART, FLAGS, folder, RayExecutor(), on_step=killed(folder, "learner", {2}))


COMMAND = """
from dataclasses import replace
from pipeline import Graph
from graphs import quickstart

def graph(steps: int = 8, every: int = 3) -> Graph:
    made = quickstart.graph(steps=steps, evaluate_every=8, warm_start_steps=20, prompts_per_step=8,
                            samples_per_prompt=4, threads=1)
    return replace(made, schedule=replace(made.schedule, checkpoint_every=every))
"""
MAIN = """
import os, signal, sys
from pathlib import Path
from pipeline.cli import console
from pipeline.record import trace
from pipeline.run import main

folder, step = Path(sys.argv[2]), console.Progress.step

def kill_once(self, number, metrics):
    step(self, number, metrics)
    done = folder / "killed"
    if number == 4 and not done.exists():
        done.touch()
        events = [event for _, event in trace.read(folder / "events.jsonl")]
        os.kill([e.pid for e in events if isinstance(e, trace.Placed) and e.group == "learner"][-1], signal.SIGKILL)

console.Progress.step = kill_once
sys.exit(main([sys.argv[1], "--run-dir", str(folder), "--plain"]))
"""


def test_the_command_goes_on_from_the_last_checkpoint_and_ends_with_the_same_weights(tmp_path, undisturbed):
    (tmp_path / "small.py").write_text(COMMAND)
    command = [sys.executable, "-c", MAIN, str(tmp_path / "small.py"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "a worker died and did not finish" in done.stderr and "restart from step 3; 1 restarts are left" in done.stderr
    )
    run_dir = RunDir(tmp_path / "run")
    assert [event.start for event in events(run_dir, trace.Started)] == [0, 3]
    assert [line["step"] for line in lines(run_dir)] == list(range(1, 9))
    assert weights(run_dir, 8) == undisturbed
    assert not check(run_dir.path)
