"""Which samples of a step are kept for inspection: its first group, and the extremes of reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from pipeline import Field, Graph, Schedule, Stage, StageContext, Task
from pipeline.declare.columns import Columns, Ragged
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.plan.samples import KeepSamples
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.journal.checker import check

torch.set_num_threads(1)
PROMPT, REWARD = Field("prompt", dtype="str"), Field("reward", dtype="float32")
REWARDS = ((1, 1), (0, 1), (3, 3), (-1, 4), (-2, -2), (1, 2), (0, 0), (1, 0))  # of the groups of a batch


@dataclass(frozen=True)
class Numbers(Stage):
    """A source whose prompts are the group numbers."""

    batch: int = len(REWARDS)
    name: str = "numbers"
    group_size: int = 2
    writes: Sequence[Field] = (PROMPT,)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Columns]:
        return lambda columns, task: {"prompt": [str(group) for group in task.groups for _ in range(2)]}


@dataclass(frozen=True)
class Score(Stage):
    """The rewards above, by the group's position in its batch."""

    name: str = "score"
    per: str = "group"  # type: ignore[assignment]
    reads: Sequence[Field] = (PROMPT,)
    writes: Sequence[Field] = (REWARD,)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Columns]:
        def run(columns: Columns, task: Task) -> Columns:
            numbers = [int(text) for text in columns["prompt"]]
            return {"reward": torch.tensor([float(REWARDS[n % len(REWARDS)][i % 2]) for i, n in enumerate(numbers)])}

        return run


def kept(folder: Path, stages: tuple[Stage, ...], keep: int) -> list[dict[str, object]]:
    """Return the kept rows of a run's second step, after checking its record."""
    described = Graph(name="kept", source=Numbers(), stages=stages, schedule=Schedule(steps=2, keep_groups=keep))
    run_dir = RunDir(folder / "run").create()
    Driver(described, plan(described)[0], LocalExecutor(), run_dir=run_dir).execute()
    assert not check(run_dir.path)
    events = [event for _, event in trace.read(run_dir.events)]
    cleared = [group for event in events if isinstance(event, trace.Cleared) and event.last for group in event.groups]
    assert sorted(cleared) == list(range(16)), "also those that were looked at and not kept"
    file = run_dir.samples(1)
    return [msgspec.json.decode(line) for line in file.read_bytes().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    ("keep", "groups"),
    [(0, ()), (1, (0,)), (2, (0, 4)), (3, (0, 2, 4)), (4, (0, 2, 3, 4)), (5, (0, 1, 2, 3, 4)), (99, range(8))],
)
def test_the_first_group_the_extremes_and_then_the_next_are_kept(
    tmp_path: Path, keep: int, groups: Sequence[int]
) -> None:
    rows = kept(tmp_path, (Score(),), keep)
    assert [row["key"] for row in rows] == [f"{8 + group:08d}_g{sample:03d}" for group in groups for sample in (0, 1)]
    assert [row["prompt"] for row in rows] == [str(8 + group) for group in groups for _ in range(2)]
    assert [row["reward"] for row in rows] == [REWARDS[group][sample] for group in groups for sample in (0, 1)]


def test_without_rewards_they_are_the_first(tmp_path: Path) -> None:
    assert [row["prompt"] for row in kept(tmp_path, (), 3)] == ["8", "8", "9", "9", "10", "10"]


def test_equal_rewards_choose_the_first() -> None:
    stage = KeepSamples(fields=(PROMPT, REWARD), keep=3)
    assert list(stage.choose({"reward": torch.ones(12)}, 2)) == [0, 1, 2]


IDS = Field("ids", dtype="int64", dims="N T")


@dataclass(frozen=True)
class Say(Stage):
    """Writes two tokens per sample."""

    asked: list[str]
    name: str = "say"
    reads: Sequence[Field] = (PROMPT,)
    writes: Sequence[Field] = (IDS,)
    shows: Sequence[Field] = (IDS,)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Columns]:
        return lambda columns, task: {"ids": Ragged.of([torch.tensor([0, 1]) for _ in columns["prompt"]])}

    def vocabulary(self, context: StageContext) -> Sequence[bytes]:
        self.asked.append(self.name)
        return [b"\xe4", b"b"]


def test_what_a_stage_shows_is_kept_and_its_vocabulary_once_a_run(tmp_path: Path) -> None:
    asked: list[str] = []
    assert [row["ids"] for row in kept(tmp_path / "first", (Say(asked),), 1)] == [[0, 1], [0, 1]]
    vocabulary = RunDir(tmp_path / "first" / "run").vocabulary
    assert msgspec.json.decode(vocabulary.read_bytes()) == ["\xe4", "b"]
    assert {path.name for path in vocabulary.parent.iterdir() if path.suffix != ".jsonl"} == {vocabulary.name}
    there = RunDir(tmp_path / "there" / "run").create()  # an earlier worker has written it
    there.vocabulary.write_bytes(b"[]")
    kept(tmp_path / "there", (Say(asked),), 1)
    assert asked == ["say"] and there.vocabulary.read_bytes() == b"[]"
