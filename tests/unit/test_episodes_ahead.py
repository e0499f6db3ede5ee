"""Episodes in runs that are ahead of their weights: how old their tokens are, and what becomes of those in the way."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Graph, Schedule
from pipeline.record import trace
from stages import ClippedLoss, Environment, Train, TruncatedIS
from tests.unit.environments import Uneven
from tests.unit.test_episode import execute, run_graph

torch.set_num_threads(1)


def ahead(environment: Environment, schedule: Schedule, **settings: Any) -> Graph:
    """The tiny graph of episodes, with a correction for samples of other versions."""
    graph = run_graph(environment, environments=1, **settings)
    loss = ClippedLoss(correction=TruncatedIS())
    stages = tuple(replace(stage, loss=loss) if isinstance(stage, Train) else stage for stage in graph.stages)
    return replace(graph, stages=stages, schedule=schedule)


def ages(events: list[Any]) -> list[int]:
    """The age of the oldest token of each trained group, in versions."""
    return [one.version - oldest for one in events if isinstance(one, trace.Trained) for oldest in one.oldest]


def crossed(events: list[Any]) -> bool:
    """Whether the weights changed within an episode that was trained."""
    trained = [one for one in events if isinstance(one, trace.Trained)]
    return any(oldest < newest for one in trained for oldest, newest in zip(one.oldest, one.newest, strict=True))


def assert_closed(log: Path) -> None:
    """Each environment that was opened was closed once, after its last turn was over."""
    calls = defaultdict(list)
    for line in log.read_text().splitlines():
        draw, what = line.split()
        calls[draw].append(what)
    for each in calls.values():
        assert each == ["open", *["turn", "over"] * (len(each) // 2 - 1), "close"]


@pytest.mark.parametrize(
    ("k", "refit", "slow", "slow_s"),
    [(1, "in_flight", "r42", 60.0), (2, "in_flight", "r18", 0.1), (1, "drain", "r42", 0.1)],
)
def test_no_token_is_too_old_and_an_environment_that_holds_its_episode_up_is_closed(
    tmp_path: Path, k: int, refit: Any, slow: str, slow_s: float
) -> None:
    """The slow group waits for its environment, and with it those that are decoded together with it: for a minute,
    until it is too old, or while weights change."""
    environment = Uneven(sleep_s=0.05, of=slow, slow_s=slow_s, log=str(tmp_path / "log"))
    schedule = Schedule(steps=5, max_staleness=k, on_stale="drop", refit=refit)
    events = execute(tmp_path / "run", ahead(environment, schedule))
    assert 0 < max(ages(events)) <= k and len(ages(events)) == 5 * 4
    assert refit == "in_flight" or not crossed(events)
    dropped = [event for event in events if isinstance(event, trace.Dropped)]
    assert slow_s < 1.0 or {event.reason for event in dropped} == {"cancelled"}
    assert all(tokens > 0 for event in dropped for tokens in event.tokens), "a turn has been drawn"
    assert_closed(tmp_path / "log")
