"""--replay RUN --episode: a kept episode against its environment, its reward, and with the policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import GraphError
from pipeline.cli.episode import replay_episode
from pipeline.run import main
from stages import Reward
from tests.unit.environments import Echo, Faulty
from tests.unit.test_episode import execute, run_graph


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    execute(folder, run_graph(Echo(), steps=1))
    return folder


def kept(run: Path) -> tuple[str, dict[str, Any]]:
    """An episode of three turns, by its name."""
    rows = [json.loads(line) for line in (run / "samples" / "step_000001.jsonl").read_text().splitlines()]
    row = next(row for row in rows if len(row["turn_ends"]) == 3)
    return f"1/{int(row['key'][:8])}/{int(row['key'][-3:])}", row


def test_an_episode_goes_as_before_and_can_be_sampled_again(run: Path) -> None:
    name, row = kept(run)
    lines, same = replay_episode(run_graph(Echo()), run, name, live=True)
    assert same and lines[0] == f"its environment: 3 turns and {row['end']!r}, as before"
    assert lines[1] == f"with the model before training: {row['end']!r} after 3 turns", "the same draws, version 0"
    said = [f"  {message['role']}: {message['content']!r}" for message in json.loads(row["conversation"])]
    assert lines[2:-1] == said and lines[-1] == f"its reward: reward is {row['reward']:g}, and was {row['reward']:g}"


def test_an_environment_that_answers_otherwise_is_found_at_its_turn(run: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    environment = Faulty(fault="differ", at=1, mark=str(mark))
    lines, same = replay_episode(run_graph(environment), run, kept(run)[0], live=False)
    assert not same and lines[0] == "its environment: differs before turn 1"


def longer(response: str) -> float:
    return float(len(response))


def change(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: row | changed


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (change(end="answered?"), "its environment: end was 'answered?' and is "),
        (change(turn_rewards=[1.0, 0.0, 0.0]), "its environment: turn_rewards was [1.0, 0.0, 0.0] and is "),
        (change(reward=-1.0), "and was -1"),
    ],
)
def test_what_was_recorded_otherwise_is_said(run: Path, tmp_path: Path, changed: Any, line: str) -> None:
    name, row = kept(run)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_000001.jsonl").write_text(json.dumps(changed(row)))
    lines, same = replay_episode(run_graph(Echo()), tmp_path, name, live=False)
    assert not same and any(line in one for one in lines)


def test_another_reward_is_scored(run: Path) -> None:
    graph = run_graph(Echo())
    name, row = kept(run)
    stages = tuple(Reward(longer) if isinstance(stage, Reward) else stage for stage in graph.stages)
    lines, same = replay_episode(replace(graph, stages=stages), run, name, live=False)
    assert not same and lines[-1].startswith(f"its reward: reward is {len(row['response'])}, and was ")


@pytest.mark.parametrize("flags", [["--live"], ["--episode", "1/0/0"], ["--live", "--replay", "runs/x"]])
def test_an_episode_has_a_run(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graphs/tool.py", *flags]) == 2
    assert f"{flags[0]}: --replay RUN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [("1/0", "it is no step, group and sample"), ("0/0/0", "it is no step"), ("1/99/0", "step 1 has not kept it"),
     ("7/0/0", "samples")],
)  # fmt: skip
def test_what_was_not_kept_is_said(run: Path, name: str, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        replay_episode(run_graph(Echo()), run, name, live=False)
