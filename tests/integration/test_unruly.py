"""Environments that fail at random: every sample is accounted for, nothing lost is trained, nothing is left running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from pipeline import Graph, Schedule
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from stages import ClippedLoss, Deadlines, End, Environment, Filter, Reply, TruncatedIS
from stages.episode.play import Play
from tests.chaos.unruly import AsyncUnruly, Unruly
from tests.journal.checker import audit
from tests.unit.test_episode import TEXTS, Worker, episode, is_running, run_graph

torch.set_num_threads(1)
DEADLINES = Deadlines(open_s=0.8, turn_s=0.8, episode_s=60.0, close_s=0.3)
STEPS, BATCH, SAMPLES = 2, 2, 2
FEW, SEEDS = 3, 100  # seeds of the ordinary tests, and of the search; in the latter, processes are forked
Plays = dict[tuple[int, int], Any]  # by group and sample; None if it did not end


def settings_of(seed: int, folder: Path) -> tuple[Unruly, dict[str, int]]:
    """What a seed says of a run: its environment, retries, processes and staleness."""
    rng = Random(seed)
    kind = rng.choice([Unruly, AsyncUnruly])
    rate = rng.choice([0.04, 0.08, 0.16])
    given = {"retries": rng.choice([0, 1, 1, 2]), "environments": rng.choice([1, 2, 4]), "k": rng.choice([0, 1])}
    return kind(seed=seed, folder=str(folder), rate=rate, gentle=seed % 2 == 1), given


def graph(environment: Unruly, *, k: int, **settings: int) -> Graph:
    """Two groups of two episodes per step."""
    made = run_graph(environment, steps=STEPS, k=k, turns=4, deadlines=DEADLINES, **settings)
    episode, _, reward, advantage, train, refit = made.stages
    train = replace(train, loss=ClippedLoss(correction=TruncatedIS(cap=2.0)))
    stages = (episode, Filter("complete", lost=1.0, max_rounds=50), reward, advantage, train, refit)
    return replace(
        made,
        source=replace(made.source, batch=BATCH),
        stages=stages,
        schedule=Schedule(steps=STEPS, max_staleness=k),
    )


class SlowOpening(Environment):
    """Opens by a plain method, and answers by a coroutine."""

    def open(self, row: Any, draw: Random) -> tuple[None, str]:
        time.sleep(0.7)
        return None, row["prompt"]

    async def turn(self, state: None, reply: Reply) -> End:
        return End()


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plays]:
    """What was played, of dropped groups too."""
    seen: Plays = {}
    run = Play.run

    async def watched(play: Play) -> Any:
        name = play.name.group, play.name.sample
        seen[name] = None
        seen[name] = await run(play)
        return seen[name]

    monkeypatch.setattr(Play, "run", watched)
    yield seen


def execute(folder: Path, described: Graph) -> list[Any]:
    """The events of a run."""
    run_dir, planned = RunDir(folder).create(), plan(described)[0]
    run_dir.plan.write_bytes(msgspec.json.encode(planned))
    Driver(described, planned, LocalExecutor(), run_dir=run_dir).execute()
    return [event for _, event in trace.read(run_dir.events)]


def test_plain_methods_beside_coroutines_run_one_by_one_and_their_deadlines_do_not_count_the_others() -> None:
    """Four openings in one process take longer together than the deadline of each."""
    worker = Worker()
    made = worker.columns(episode(SlowOpening(), environments=1, deadlines=replace(DEADLINES, open_s=2.0)), TEXTS[:2])
    retried = [output.metrics["retried"] for output in worker.outputs(episode(SlowOpening(), environments=1), ["1"])]
    worker.close()
    assert made["end"] == ["answered"] * 4 and retried == [0.0]


@pytest.mark.parametrize("seed", [*range(FEW), *(pytest.param(i, marks=pytest.mark.search) for i in range(FEW, SEEDS))])
def test_a_run_with_unruly_environments_is_sound(
    tmp_path: Path, plays: Plays, seed: int, request: pytest.FixtureRequest
) -> None:
    if seed >= FEW:
        request.getfixturevalue("forked_environments")
    (tmp_path / "notes").mkdir()
    environment, given = settings_of(seed, tmp_path / "notes")
    events = execute(tmp_path / "run", graph(environment, **given))
    report = audit(tmp_path / "run", stall_s=60.0)
    assert report.violations == [] and report.clean
    assert sum(report.staleness.values()) == STEPS * BATCH
    for (group, sample), made in plays.items():
        ends = environment.ends((0, group, sample), retries=given["retries"])
        assert len(ends) == 1 or not environment.gentle
        assert made.end in ends, f"sample {sample} of group {group}"
        assert len(made.turn_ends) == len(made.turn_rewards) and made.turn_ends[-1] == len(made.ids)
    assert_lost_are_dropped(events, plays)
    assert_nothing_is_left(tmp_path / "notes")


def assert_lost_are_dropped(events: list[Any], plays: Plays) -> None:
    """Exactly the groups with a lost episode, for its reason; all others are trained."""
    dropped = {group: event.reason for event in events if isinstance(event, trace.Dropped) for group in event.groups}
    trained = {group for event in events if isinstance(event, trace.Trained) for group in event.groups}
    for group in {group for group, _ in plays}:
        lost = {made.end for (of, _), made in plays.items() if of == group and made.end.startswith("lost:")}
        assert (dropped[group] in lost) if lost else group in trained, f"group {group}"
    assert not trained & dropped.keys()


def assert_nothing_is_left(notes: Path) -> None:
    """No process of an environment, and none that it started."""
    pids = [int(path.stem) for path in notes.glob("*.process")]
    ends_s = time.monotonic() + 10.0
    while any(map(is_running, pids)) and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert pids and not [pid for pid in pids if is_running(pid)]
