"""A whole graph around the smallest Qwen3, which samples and trains on the torch backend within a second per step."""

from __future__ import annotations

from ops.rewards import exact_match
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import Advantage, ClippedLoss, Generated, PrevLogprobs, Prompts, Refit, Reward, Rollout, Train
from tests.unit.tiny import QWEN3


def graph(steps: int = 2, checkpoint_every: int = 1, seed: int = 0) -> Graph:
    task = Generated("reverse", digits=2, held_out=20)
    policy = Model("tiny", config=QWEN3, alphabet=task.alphabet)
    sampler = WorkerGroup("sampler", backend="torch", threads=1)
    learner = WorkerGroup("learner", backend="torch", threads=1)
    return Graph(
        name="tiny",
        source=Prompts(task, batch=4),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=3),
            Reward(exact_match),
            PrevLogprobs(policy, on=learner),
            Advantage("group_relative"),
            Train(policy, on=learner, loss=ClippedLoss(), lr=1e-2),
            Refit(policy, source=learner, target=sampler),
        ),
        schedule=Schedule(steps=steps, checkpoint_every=checkpoint_every, seed=seed),
    )
