"""DAPO (arXiv 2503.14476) on a small, randomly initialized Qwen3: two CPU cores, no download.

python -m pipeline.run graphs/dapo.py

It adds four lines to GRPO: clip-higher, dynamic sampling, the token mean and overlong shaping. For your own model and
data, use `policy` and `source` as in graphs/grpo.py, and the paper's max_tokens=20480, cache=4096 and lr=1e-6.
"""

from typing import Literal

from graphs.quickstart import TINY_QWEN3
from ops.rewards import Overlong, exact_match
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import (
    Advantage,
    ClippedLoss,
    Evaluate,
    Filter,
    Generated,
    PrevLogprobs,
    Prompts,
    Refit,
    Reward,
    Rollout,
    Supervised,
    Train,
    TruncatedIS,
)


def graph(
    task: Literal["reverse", "sort", "add"] = "reverse",
    steps: int = 40,
    max_staleness: int = 0,
    seed: int = 0,
    prompts_per_step: int = 16,
    samples_per_prompt: int = 16,
    max_rounds: int = 20,
    cache: int = 2,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    lr: float = 1e-3,
    minibatches: int = 4,
    warm_start_steps: int = 600,
    warm_start_until: float = 0.25,
    evaluate_every: int = 20,
    threads: int = 2,
) -> Graph:
    """Teaches a tiny transformer a task with a 0/1 reward, on prompts that it answers correctly only some of the time.

    task                the task to learn
    steps               batches to train on
    max_staleness       policy versions that sampling may run ahead of training; 0 is synchronous
    seed                seed of the model's weights and of all random numbers
    prompts_per_step    groups per batch
    samples_per_prompt  responses per prompt
    max_rounds          maximum number of batches of prompts sampled per step
    cache               tokens before the maximum length over which the length penalty grows
    clip_low            how far a token's ratio may fall below 1
    clip_high           how far a token's ratio may rise above 1
    lr                  learning rate
    minibatches         optimizer updates per batch; with 1, nothing is ever clipped
    warm_start_steps    maximum number of supervised updates before DAPO
    warm_start_until    fraction of correct answers at which they end; if all are wrong, there is nothing to learn from
    evaluate_every      steps between evaluations on 1,000 held-out prompts
    threads             torch threads of sampler and learner, each
    """
    source = Generated(task, digits=4)
    policy = Model(
        "tiny-qwen3",
        config=TINY_QWEN3,
        alphabet=source.alphabet,
        warm_start=Supervised(source, steps=warm_start_steps, until=warm_start_until),
        seed=seed,
    )
    sampler = WorkerGroup("sampler", backend="torch", threads=threads)
    learner = WorkerGroup("learner", backend="torch", threads=threads)
    max_tokens = source.max_answer + 1 + cache
    loss = ClippedLoss(
        clip=(clip_low, clip_high),
        aggregation="token",
        correction=TruncatedIS(cap=2.0) if max_staleness else None,
    )
    return Graph(
        name="dapo",
        host=sampler,
        source=Prompts(source, batch=prompts_per_step),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=samples_per_prompt, max_tokens=max_tokens),
            Reward(exact_match, Overlong(max_tokens=max_tokens, cache=cache)),
            Filter("zero_spread", of="reward_exact_match", max_rounds=max_rounds),
            PrevLogprobs(policy, on=learner),
            Advantage("group_relative"),
            Train(policy, on=learner, loss=loss, lr=lr, betas=(0.9, 0.95), minibatches=minibatches),
            Refit(policy, source=learner, target=sampler),
            Evaluate(policy, source, on=sampler, every=evaluate_every, max_tokens=max_tokens),
        ),
        schedule=Schedule(steps=steps, max_staleness=max_staleness, seed=seed),
    )
