"""Workers killed during a run: a sampler is replaced and nothing changes, a trainer resumes from a checkpoint.

The record of every run here is checked by tests/journal, which covers attempts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import console
from pipeline.cli.load import load
from pipeline.errors import StageError, WorkerLost
from pipeline.record import trace
from pipeline.run import main
from pipeline.rundir import RunDir
from tests.integration.test_async import FAST, NUMBERS, QUICKSTART, SLOW_TAIL, events, execute, lines, weights
from tests.journal.checker import check

FLAGS: dict[str, Any] = {"steps": 8, "evaluate_every": 8, **FAST}


def killed(run_dir: Path, group: str, steps: set[int]) -> Callable[[int, dict[str, float]], None]:
    """Kill the current worker of a group after each of these steps."""

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step in steps:
            os.kill(pids(run_dir, group)[-1], signal.SIGKILL)

    return on_step


def killed_until_written_again(
    run_dir: Path, is_short: Callable[[int], bool]
) -> Callable[[int, dict[str, float]], None]:
    """Kill the sampler while short groups are in flight, and again if all its groups were dropped meanwhile."""
    killed: set[int] = set()

    def on_step(step: int, metrics: dict[str, float]) -> None:
        found = RunDir(run_dir)
        puts = [event for event in events(found, trace.Put) if event.stage == "sample"]
        pid = pids(run_dir, "sampler")[-1]
        if pid in killed or any(event.attempt for event in puts):
            return
        dropped = groups_of(events(found, trace.Dropped))
        asked = groups_of(event for event in events(found, trace.Submitted) if event.stage == "sample")
        under_way = asked - groups_of(puts) - dropped
        if step >= 4 and groups_of(events(found, trace.Retried)) <= dropped and any(map(is_short, under_way)):
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)

    return on_step


def groups_of(found: Iterable[Any]) -> set[int]:
    """Return all groups that these events name."""
    return {group for event in found for group in event.groups}


def pids(run_dir: Path, group: str) -> list[int]:
    """Return the process ids of a group so far; the last one is the current process."""
    return [event.pid for event in events(RunDir(run_dir), trace.Placed) if event.group == group]


@pytest.mark.parametrize(
    "flags, after",
    [({}, {1, 4}), ({"max_staleness": 1, "steps": 4, "evaluate_every": 4}, {1})],
    ids=["synchronous", "ahead"],
)
def test_a_sampler_that_dies_is_replaced_and_its_samples_are_made_again(
    tmp_path, ray_session, undisturbed, flags, after
):
    from pipeline.executors.ray import RayExecutor

    folder = tmp_path / "run"
    run_dir = execute(QUICKSTART, FLAGS | flags, folder, RayExecutor(), on_step=killed(folder, "sampler", after))
    placed = pids(folder, "sampler")
    assert len(placed) == len(set(placed)) == 1 + len(after)
    retried = events(run_dir, trace.Retried)
    assert retried and {event.reason for event in retried} == {"worker sampler.0 died"}
    if not flags:  # ahead, a second attempt may sample with newer weights than the first
        assert weights(run_dir, 8) == undisturbed
    assert [line["step"] for line in lines(run_dir)] == list(range(1, 1 + (FLAGS | flags)["steps"]))
    assert not check(run_dir.path)


def test_streams_that_die_are_begun_again_and_slow_groups_still_dropped(tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    flags = {"steps": 30, "max_staleness": 1, "on_stale": "drop", "refit": "in_flight", **SLOW_TAIL, "token_s": 0.01}
    folder = tmp_path / "run"
    file = load(NUMBERS)
    sample: Any = next(stage for stage in file.build(flags).stages if stage.name == "sample")
    executor = RayExecutor(modules=user_modules(file.module))
    on_step = killed_until_written_again(folder, lambda group: sample.length(group) <= 4)
    run_dir = execute(NUMBERS, flags, folder, executor, on_step=on_step)
    assert any(event.stage == "sample" for event in events(run_dir, trace.Retried))
    again = [event.start_s for event in events(run_dir, trace.Put) if event.stage == "sample" and event.attempt]
    assert again
    assert any(event.at_s > again[0] for event in events(run_dir, trace.Dropped))
    trained = events(run_dir, trace.Trained)
    assert any(a < b for one in trained for a, b in zip(one.oldest, one.newest)), "weights changed between tokens"
    assert max(one.version - oldest for one in trained for oldest in one.oldest) <= 1
    assert any(event.reason == "cancelled" for event in events(run_dir, trace.Dropped))
    assert events(run_dir, trace.Ended)[0].rows_left == 0
    assert not check(run_dir.path)


def test_a_group_whose_workers_keep_dying_ends_the_run(tmp_path, ray_session, monkeypatch):
    from pipeline.executors import losses
    from pipeline.executors.ray import RayExecutor

    monkeypatch.setattr(losses, "RESTARTS", 1)
    folder = tmp_path / "run"
    with pytest.raises(StageError, match=r"a worker died and did not .*; 1 others died before it"):
        execute(QUICKSTART, FLAGS, folder, RayExecutor(), on_step=killed(folder, "sampler", {1, 3}))


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


def in_command(
    graph: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, on_step: Callable[[int, dict[str, float]], None]
) -> int:
    """Return the exit code of the command, run in this process and on its Ray, calling `on_step` after each step."""
    step = console.Progress.step

    def and_more(progress: console.Progress, number: int, metrics: dict[str, float]) -> None:
        step(progress, number, metrics)
        on_step(number, metrics)

    monkeypatch.setattr(console.Progress, "step", and_more)
    return main([str(graph), "--run-dir", str(folder), "--plain"])


def test_the_command_goes_on_from_the_last_checkpoint_and_ends_with_the_same_weights(
    tmp_path, ray_session, undisturbed, monkeypatch, capsys
):
    (tmp_path / "small.py").write_text(COMMAND)
    folder, died = tmp_path / "run", []

    def kill_once(step: int, metrics: dict[str, float]) -> None:
        if (group := {1: "sampler", 4: "learner"}.get(step)) and group not in died:
            died.append(group)
            os.kill(pids(folder, group)[-1], signal.SIGKILL)

    assert in_command(tmp_path / "small.py", folder, monkeypatch, kill_once) == 0
    printed, said = capsys.readouterr()
    assert "worker sampler.0 died; its tasks run again, on a worker that takes its place" in said
    assert "a worker died and did not finish" in said and "restart from step 3; restarts left: 1" in said
    run_dir = RunDir(folder)
    assert "raylet" not in said + printed and "A worker died" in (run_dir.logs / "ray.log").read_text()
    assert [event.start for event in events(run_dir, trace.Started)] == [0, 3]
    assert [line["step"] for line in lines(run_dir)] == list(range(1, 9))
    assert weights(run_dir, 8) == undisturbed
    assert not check(run_dir.path)
