"""Episodes whose turns have advantages of their own are trained as by a loop written by hand, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from graphs.quickstart import TINY_QWEN3
from ops.rewards import turn_sum
from pipeline import Graph, Model, Schedule, WorkerGroup
from pipeline.executors.local import LocalExecutor
from pipeline.rundir import RunDir
from stages import (
    Advantage,
    End,
    Environment,
    Episode,
    Filter,
    Generated,
    PrevLogprobs,
    Prompts,
    Refit,
    Reply,
    Reward,
    Train,
)
from stages.backends import STREAM_ROLLOUT
from tests.integration import handwritten_turns as by_hand
from tests.integration.test_parity import assert_same, execute, losses, weights
from tests.unit.environments import Echo
from tests.unit.test_turn_advantages import Paying

torch.set_num_threads(1)
STEPS, PROMPTS, SAMPLES, MINIBATCHES, LR, DISCOUNT, SEED = 20, 4, 2, 2, 5e-3, 0.9, 3
TURN_TOKENS, TOKENS = 4, 20
TASK = Generated("reverse", digits=2, held_out=20)


def graph(environment: Environment, schedule: Schedule, **given: int) -> Graph:
    """Episodes with advantages of turns."""
    policy = Model("tiny", config=TINY_QWEN3, alphabet=TASK.alphabet, seed=SEED)
    sampler, learner = (WorkerGroup(name, backend="torch", threads=1) for name in ("sampler", "learner"))
    limits = {"turns": 3, "tokens": TOKENS, "turn_tokens": TURN_TOKENS, "environments": 1} | given
    return Graph(
        name="turns",
        host=sampler,
        source=Prompts(TASK, batch=PROMPTS),
        stages=(
            Episode(policy, environment, on=sampler, samples_per_prompt=SAMPLES, **limits),
            Filter("complete"),
            Reward(turn_sum),
            PrevLogprobs(policy, on=learner),
            Advantage("turn", discount=DISCOUNT),
            Train(policy, on=learner, lr=LR, minibatches=MINIBATCHES, advantage="token"),
            Refit(policy, source=learner, target=sampler),
        ),
        schedule=replace(schedule, seed=SEED, checkpoint_every=schedule.steps),
    )


def play(prompt: str, draw: Random) -> Callable[[str], tuple[str | None, float]]:
    """An episode of `Paying`, without a process."""
    state, _ = Paying().open({"prompt": prompt}, draw)

    def answer(text: str) -> tuple[str | None, float]:
        found = Paying().turn(state, Reply(text))
        return None if isinstance(found, End) else str(found.said), found.reward

    return answer


def test_the_stages_equal_the_handwritten_loop(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    execute(LocalExecutor(), run_dir, graph=graph(Paying(), Schedule(steps=STEPS)))
    settings = by_hand.Settings(
        config=TINY_QWEN3, alphabet=TASK.alphabet, example=lambda i: TASK.train(i, order=SEED)[0], play=play,
        stream=STREAM_ROLLOUT, turn_tokens=TURN_TOKENS, tokens=TOKENS, steps=STEPS, prompts=PROMPTS, samples=SAMPLES,
        minibatches=MINIBATCHES, lr=LR, discount=DISCOUNT, seed=SEED,
    )  # fmt: skip
    assert len(losses(run_dir)) == STEPS and len(set(losses(run_dir))) == STEPS
    assert_same(run_dir, by_hand.run(settings))


def test_a_run_that_may_be_no_version_ahead_is_the_synchronous_one_over_twelve_turns(tmp_path: Path) -> None:
    """Weights may change between turns, and stale episodes may be dropped, but with max_staleness=0 none is."""
    found = []
    ahead = Schedule(steps=3, max_staleness=0, refit="in_flight", on_stale="drop")
    for schedule, sleep_s in ((Schedule(steps=3), 0.0), (ahead, 0.01)):
        run_dir = RunDir(tmp_path / str(sleep_s))
        limits = {"turns": 12, "tokens": 50, "turn_tokens": 2}
        execute(LocalExecutor(), run_dir, graph=graph(Echo(12, sleep_s), schedule, **limits))
        lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
        ends = [line["episode/turns"] for line in lines if line["step"] > 0]
        assert ends == [12.0] * 3
        found.append((losses(run_dir), weights(run_dir, steps=3)))
    (wanted, sync), (made, other) = found
    assert wanted == made and all(torch.equal(sync[name], other[name]) for name in sync)
