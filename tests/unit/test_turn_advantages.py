"""Advantages of turns reach the tokens of their turns, whichever way a batch is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from ops.rewards import turn_sum
from pipeline import Graph, Task
from pipeline.declare.columns import Ragged
from stages import Advantage, End, Environment, Messages, Packed, PrevLogprobs, Reply, Reward
from stages.backends.trainer import BaseLearner
from stages.vocabulary import TOKEN_ADVANTAGES
from tests.unit.test_episode import TEXTS, Worker, episode, execute, published, run_graph

torch.set_num_threads(1)


@dataclass(frozen=True)
class Paying(Environment):
    """Pays for each turn by its text, and ends after one to three of them, by its draw."""

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        return {"left": draw.randint(1, 3)}, row["prompt"]

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        state["left"] -= 1
        reward = float(sum(map(ord, reply.text)) % 7)
        return Messages("12", reward) if state["left"] else End("answered", reward)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def by_hand(turn_rewards: list[list[float]], rewards: list[float]) -> list[list[float]]:
    """The advantage of each turn of one group, without a discount."""
    turns = [[*row[:-1], row[-1] + reward] for row, reward in zip(turn_rewards, rewards)]
    every = [reward for row in turns for reward in row]
    mean = sum(every) / len(every)
    spread = math.sqrt(sum((each - mean) ** 2 for each in every) / (len(every) - 1)) if len(set(every)) > 1 else 1.0
    return [[sum((each - mean) / (spread + 1e-6) for each in row[u:]) for u in range(len(row))] for row in turns]


def test_each_token_has_the_advantage_of_its_turn(worker: Worker) -> None:
    made = worker.columns(episode(Paying()))
    rewards = [float(i % 3) for i in range(len(TEXTS) * 2)]
    columns = {name: Ragged.of(made[name]) for name in ("turn_rewards", "turn_ends", "token_versions")}
    stage = Advantage("turn").setup(worker.context)
    out = stage(columns | {"reward": torch.tensor(rewards)}, Task(stage="advantage", step=0, groups=(5, 6, 7, 8)))
    found = out.columns[TOKEN_ADVANTAGES.name]
    assert len({len(row) for row in made["turn_rewards"]}) > 1, "some have more turns than others"
    for first in range(0, len(rewards), 2):
        rows = [made["turn_rewards"][i].tolist() for i in (first, first + 1)]
        for i, turns in zip((first, first + 1), by_hand(rows, rewards[first : first + 2])):
            ends, turn = made["turn_ends"][i].tolist(), 0
            for t, version in enumerate(made["token_versions"][i].tolist()):
                turn += t >= ends[turn]  # an inserted token begins the next turn
                wanted = turns[turn] if version >= 0 else 0.0
                assert found.rows()[i][t].item() == pytest.approx(wanted, abs=1e-4)


def turn_graph(**settings: Any) -> Graph:
    """Episodes whose turns are trained with advantages of their own."""
    graph = run_graph(Paying(), steps=1)
    train: Any = graph.stages[4]
    cut = settings.get("microbatch", 0)
    scoring = (PrevLogprobs(train.model, on=train.on, microbatch=cut),) if settings.get("prev") == "field" else ()
    stages = (
        *graph.stages[:2], Reward(turn_sum), Advantage("turn", discount=0.9), *scoring,
        replace(train, advantage="token", minibatches=2, **settings), graph.stages[5],
    )  # fmt: skip
    return replace(graph, stages=stages)


CUTS = [{}, {"prev": "field"}, {"microbatch": Packed(64)}]


def test_an_update_sees_the_advantages_of_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the stage wrote, and the losses of all ways to cut a batch agree."""
    seen: list[Any] = []
    update = BaseLearner.update

    def watched(learner: BaseLearner, batch: Any, *given: Any, **named: Any) -> dict[str, float]:
        made = update(learner, batch, *given, **named)
        seen.append((batch.advantage, batch.sampled, made["loss"]))
        return made

    monkeypatch.setattr(BaseLearner, "update", watched)
    runs = []
    for number, settings in enumerate(CUTS):
        seen.clear()
        hashes = published(execute(tmp_path / str(number), turn_graph(**settings)))
        runs.append((hashes, [loss for *_, loss in seen]))
        advantage, sampled, _ = seen[0]
        assert advantage.lengths == sampled.lengths and (advantage.values[~sampled.values] == 0).all()
        assert any(len(set(row.tolist()) - {0.0}) > 1 for row in advantage.rows()), "turns of a sample differ"
    assert runs[0] == runs[1], "to the bit, wherever old logprobs come from"
    assert len(runs[0][1]) == 2
    for _, losses in runs[2:]:
        assert losses[0] == pytest.approx(runs[0][1][0], rel=1e-4)
    assert all(len(set(hashes)) == 2 for hashes, _ in runs)


def test_the_sum_of_turns_is_a_reward() -> None:
    assert turn_sum([0.5, -1.0, 2.0]) == 1.5
    assert turn_sum([]) == 0.0
    assert Reward(turn_sum).reads[0].name == "turn_rewards"
