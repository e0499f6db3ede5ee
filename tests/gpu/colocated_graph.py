"""A small model that samples and trains in turns on one GPU."""

from __future__ import annotations

from typing import Literal

from graphs.quickstart import TINY_QWEN3
from ops.rewards import digit_match
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import Advantage, ClippedLoss, Generated, PrevLogprobs, Prompts, Refit, Reward, Rollout, Train


def graph(generator: Literal["torch", "vllm"] = "torch", steps: int = 10_000) -> Graph:
    """GRPO on reversed digits."""
    source = Generated("reverse", digits=4)
    policy = Model("tiny-qwen3", config=TINY_QWEN3 | {"head_dim": 64}, alphabet=source.alphabet)
    learner = WorkerGroup("learner", backend="torch", gpus=1)
    sampler = WorkerGroup("sampler", backend=generator, gpus=1, colocated=learner)
    return Graph(
        name="colocated",
        source=Prompts(source, batch=4),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=4, max_tokens=source.max_answer + 1),
            Reward(digit_match),
            PrevLogprobs(policy, on=learner),
            Advantage("group_relative"),
            Train(policy, on=learner, loss=ClippedLoss(), lr=1e-4, minibatches=1),
            Refit(policy, source=learner, target=sampler),
        ),
        schedule=Schedule(steps=steps, checkpoint_every=steps),
    )
