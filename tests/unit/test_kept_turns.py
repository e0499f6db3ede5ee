"""A run that goes on from a checkpoint, or whose worker is started again, goes on in the middle of its episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.declare.version_folders import VersionFolders
from pipeline.rundir import RunDir
from stages.episode.environment import Messages, Reply
from stages.episode.frames import HEAD
from stages.episode.kept_turns import KeptTurns
from stages.episode.turns import EpisodeName, NextTurn, TurnSampler, one_of
from tests.unit.environments import Echo
from tests.unit.streams import whole
from tests.unit.test_episode import TEXTS, Worker, episode, execute, published, run_graph, same

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("forked_environments")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path).create()


@pytest.fixture
def workers(run_dir: RunDir) -> Iterator[Any]:
    made: list[Worker] = []

    def start() -> Worker:
        """A worker of the run, as it is after each start."""
        made.append(worker := Worker())
        worker.context = replace(worker.context, run_dir=run_dir.path)
        return worker

    yield start
    for worker in made:
        worker.close()


def turns_of(run_dir: RunDir) -> VersionFolders:
    return VersionFolders(run_dir.turns)


def frames_of(run_dir: RunDir, version: int = 0) -> tuple[Path, list[int]]:
    """The only file of turns, and where its frames end."""
    (path,) = turns_of(run_dir).of(version).iterdir()
    content, ends = path.read_bytes(), []
    while not ends or ends[-1] < len(content):
        at = ends[-1] if ends else 0
        ends.append(at + HEAD.size + HEAD.unpack_from(content, at)[0])
    return path, ends


def cut(run_dir: RunDir, turns: int, *, torn: int = 0) -> None:
    """Leave that many turns, and some bytes of the next, as if the worker had been killed there."""
    path, ends = frames_of(run_dir)
    path.write_bytes(path.read_bytes()[: ends[turns - 1] + torn])


def metrics(outputs: list[Any], name: str) -> list[float]:
    return [output.metrics[name] for output in outputs]


@dataclass(frozen=True)
class Other(Echo):
    """Says something else at its second turn."""

    def turn(self, state: Any, reply: Reply) -> Any:
        found = super().turn(state, reply)
        return Messages("7", 0.5) if state["turn"] == 2 else found


@pytest.mark.parametrize(("turns", "found"), [(8, 1), (11, 1), (16, 2)])
def test_episodes_go_on_where_they_were(run_dir: RunDir, workers: Any, turns: int, found: int) -> None:
    """On torch in whole waves of eight turns: what is computed together decides about the last bit."""
    before = workers().columns(episode(Echo()))
    cut(run_dir, turns, torn=9)
    worker = workers()
    outputs = worker.outputs(episode(Echo()))
    assert set(metrics(outputs, "turns_found")) == {found} and set(metrics(outputs, "differed")) == {0.0}
    after = whole(outputs)
    rows = {name: column.rows() if hasattr(column, "rows") else list(column) for name, column in after.items()}
    assert same(before, rows)


def test_an_environment_that_answers_otherwise_is_found_and_sampled_again(run_dir: RunDir, workers: Any) -> None:
    workers().columns(episode(Echo()))
    cut(run_dir, 24)
    outputs = workers().outputs(episode(Other()))
    assert set(metrics(outputs, "differed")) == {1.0} and set(metrics(outputs, "turns_found")) == {2.0}
    for conversation in whole(outputs)["conversation"]:
        assert json.loads(conversation)[4]["content"] == "7"


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"turn_tokens": 5}])
def test_turns_of_other_settings_are_not_taken(run_dir: RunDir, workers: Any, changed: dict[str, Any]) -> None:
    workers().columns(episode(Echo()))
    assert set(metrics(workers().outputs(episode(Echo(), **changed)), "turns_found")) == {0.0}


def test_turns_of_another_version_are_not_taken(run_dir: RunDir, workers: Any) -> None:
    stage, worker = episode(Echo()), workers()
    worker.columns(stage)
    kept = KeptTurns(turns_of(run_dir), "again", settings_of(worker, stage))
    first = NextTurn(worker.shared["engine"].encode(stage.model, [TEXTS[0]]).values, 0, 6, 0)
    assert kept.find(0, EpisodeName(5, 0), first) is not None
    assert kept.find(1, EpisodeName(5, 0), first) is None
    assert kept.find(0, EpisodeName(5, 0), replace(first, most=5)) is None and kept.differed == {EpisodeName(5, 0)}
    assert kept.find(0, EpisodeName(6, 0), first) is None and EpisodeName(6, 0) in kept.differed


def test_a_turn_is_found_as_it_was_kept(run_dir: RunDir) -> None:
    first = NextTurn(torch.zeros(1, dtype=torch.long), 0, 4, 0)
    kept, made = KeptTurns(turns_of(run_dir), "episode", ()), drawn(3, 3)
    made.truncated[0] = True
    made.response_ids.values[:], made.logprobs.values[:] = torch.tensor([7, 151_000]), torch.tensor([-0.1, -2.5e-7])
    kept.keep(EpisodeName(1, 2), first, made)
    kept.close()
    found = KeptTurns(turns_of(run_dir), "episode", ()).find(3, EpisodeName(1, 2), first)
    assert found is not None and found.truncated.tolist() == [True]
    for one in ("response_ids", "logprobs", "versions"):
        was, now = getattr(made, one), getattr(found, one)
        assert (
            torch.equal(was.values, now.values) and was.values.dtype == now.values.dtype and was.lengths == now.lengths
        )


def settings_of(worker: Worker, stage: Any) -> Any:
    return (worker.context.seed, "torch", stage.model.source, stage.sampling(stage.turn_tokens))


def test_only_what_a_run_can_go_on_with_stays(run_dir: RunDir) -> None:
    """The last two versions, and that of the last checkpoint; a turn of two versions is not kept."""
    kept, name = KeptTurns(turns_of(run_dir), "episode", ()), EpisodeName(0, 0)
    for version in range(6):
        if version == 2:
            run_dir.checkpoint(version).mkdir()
        kept.keep(name, NextTurn(torch.zeros(1, dtype=torch.long), 0, 4, 0), drawn(version, version))
        turns_of(run_dir).keep_for(version, run_dir.checkpoint_steps)
    kept.keep(name, NextTurn(torch.zeros(1, dtype=torch.long), 0, 4, 1), drawn(6, 7))
    assert sorted(turns_of(run_dir).by_version()) == [2, 4, 5]
    turns_of(run_dir).forget(lambda version: version != 2)
    assert sorted(turns_of(run_dir).by_version()) == [2]
    kept.close()


def test_a_full_disk_ends_the_keeping_and_not_the_run(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    kept, first = KeptTurns(turns_of(run_dir), "episode", ()), NextTurn(torch.zeros(1, dtype=torch.long), 0, 4, 0)
    run_dir.turns.write_text("in the way")
    for _ in range(2):
        kept.keep(EpisodeName(0, 0), first, drawn(0, 0))
    assert capsys.readouterr().err.count("turns are kept no longer, and a resume samples them again:") == 1


def drawn(*versions: int) -> Any:
    from pipeline.declare.columns import Ragged
    from stages.backends import Generation

    lengths = (len(versions),)
    return one_of(
        Generation(
            Ragged(torch.zeros(len(versions), dtype=torch.long), lengths),
            Ragged(torch.zeros(len(versions)), lengths),
            torch.tensor([False]),
            Ragged(torch.tensor(versions, dtype=torch.int32), lengths),
        ),
        0,
    )


class CutOffError(Exception):
    """The driver is gone."""


def test_a_run_that_was_cut_off_in_its_episodes_ends_as_the_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second wave of turns of its second step."""
    graph = run_graph(Echo(), steps=3)
    uncut = execute(tmp_path / "whole", graph)
    assert not turns_of(RunDir(tmp_path / "whole")).by_version(), "nothing is left of a run that is done"
    sample, asked = TurnSampler.sample, [0]

    async def cut_off(turns: Any, *given: Any) -> Any:
        made = await sample(turns, *given)
        asked[0] += turns.version == 1
        if asked[0] > 12:
            raise CutOffError
        return made

    with monkeypatch.context() as patch, pytest.raises(Exception, match="CutOffError"):
        patch.setattr(TurnSampler, "sample", cut_off)
        execute(tmp_path / "cut", graph)
    run_dir = RunDir(tmp_path / "cut")
    assert sorted(turns_of(run_dir).by_version()) == [0, 1] and run_dir.checkpoint_steps() == [1]
    events = execute(run_dir.path, graph, start=1)
    last = {event.step: event.sha256 for event in events if type(event).__name__ == "Published"}
    assert list(last.values()) == published(uncut)
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    assert [line["episode/turns_found"] for line in lines if "episode/turns_found" in line] == [2.0, 0.0]
