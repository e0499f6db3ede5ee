"""A replay checks what a task returns as a worker and a put do: streams, shares of a rank, dropped groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import DataPlaneError, Graph, Output, Schedule, Stage, StageError, Task
from pipeline.declare.sharding import Shard
from pipeline.executors.replay import run_again
from tests.unit.toy import PROMPT, REWARD, Toy


@dataclass(frozen=True)
class Scores(Stage):
    """A stage whose runner is given."""

    run: Callable[[Any, Any], Any]
    shape: Any = "map"
    name = "scores"
    reads = (PROMPT,)
    writes = (REWARD,)
    group_size = 2

    def setup(self, context: Any) -> Any:
        return self.run


def replayed(stage: Stage, **task: Any) -> Output:
    """Replay a task of two groups of two samples."""
    made = Graph(name="g", source=Toy("prompts", writes=(PROMPT,)), stages=(stage,), schedule=Schedule(steps=1))
    given = Task(stage="scores", step=0, **{"groups": (4, 7)} | task)
    return run_again(made, Path("failures"), given, {"prompt": ["a", "b", "c", "d"]})


def streaming(*outputs: Output) -> Scores:
    async def run(columns: Any, task: Any) -> Any:
        for output in outputs:
            yield output

    return Scores(run, shape="stream")


def part(value: float, *index: int) -> Output:
    return Output({"reward": torch.full((len(index),), value)}, metrics={"mean": value}, index=index)


def test_the_outputs_of_a_stream_become_one() -> None:
    made = replayed(streaming(Output(open={"generate": 4}), part(3.0, 2, 3), part(1.0, 0, 1)))
    with pytest.raises(StageError, match=r"returned open={'generate': -1}; a stream counts"):
        replayed(streaming(Output(open={"generate": -1}), part(3.0, 2, 3), part(1.0, 0, 1)))
    assert made.columns["reward"].tolist() == [1.0, 1.0, 3.0, 3.0]  # type: ignore[union-attr]
    assert made.metrics == {"mean": 2.0}


def test_a_stream_that_forgets_a_group_fails_again() -> None:
    with pytest.raises(StageError, match="stage 'scores' ended without output for 1 group, 7 among them"):
        replayed(streaming(part(1.0, 0, 1)))
    cancelled = Output(cancelled={1: 5})
    assert replayed(streaming(part(1.0, 0, 1), cancelled)).metrics == {"mean": 1.0}


def test_a_bad_value_of_a_stream_fails_again() -> None:
    with pytest.raises(DataPlaneError, match="field 'reward', key 00000007_g000: value nan"):
        replayed(streaming(part(1.0, 0, 1), part(float("nan"), 2, 3)))


def test_the_keys_of_a_rank_are_those_of_its_share() -> None:
    share = Shard(1, 2, (1, 3), (), packed=False)
    values = torch.tensor([1.0, float("inf")])
    with pytest.raises(DataPlaneError, match="field 'reward', key 00000007_g001: value inf"):
        replayed(Scores(lambda columns, task: {"reward": values}), shard=share)
    assert replayed(Scores(lambda columns, task: {"reward": values[:1].repeat(2)}), shard=share).columns


def test_only_a_stage_with_a_gate_drops_groups() -> None:
    dropping = Output({"reward": torch.ones(2)}, dropped={1: "dull"})
    with pytest.raises(StageError, match=r"stage 'scores' drops groups \[1\] of 2"):
        replayed(Scores(lambda columns, task: dropping))


def test_other_columns_fail_again() -> None:
    with pytest.raises(StageError, match="the output of stage 'scores' lacks reward and adds score"):
        replayed(Scores(lambda columns, task: {"score": torch.ones(4)}))
