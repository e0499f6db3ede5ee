"""GRPO on episodes: a tiny model learns to call a calculator. Two CPU cores, about a minute, no download.

python -m pipeline.run graphs/tool.py

The model sees m37*48>, calls the calculator with m37*48=, sees 1776>, and answers 1776. Before GRPO it has seen calls,
but mostly answers at once, and these are wrong. Without the calculator (--turns 1) it has to multiply.
"""

import re
from dataclasses import dataclass

from graphs.quickstart import TINY_QWEN3
from ops.rewards import exact_match
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import (
    Advantage,
    Calculated,
    ClippedLoss,
    End,
    Environment,
    Episode,
    Evaluate,
    Filter,
    Generated,
    Messages,
    Prompts,
    Refit,
    Reply,
    Reward,
    Supervised,
    Train,
    TruncatedIS,
)


@dataclass(frozen=True)
class Calculator(Environment):
    """Multiplies what the model calls, and ends the episode with anything else."""

    def open(self, row, draw):
        """The prompt."""
        return None, row["prompt"]

    def turn(self, state, reply: Reply) -> Messages | End:
        """The product in four digits, as answers have it."""
        called = re.fullmatch(r"m(\d\d)\*(\d\d)=", reply.text)
        return Messages(f"{int(called[1]) * int(called[2]):04d}>") if called else End("answered")


def graph(
    steps: int = 40,
    max_staleness: int = 0,
    seed: int = 0,
    turns: int = 2,
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    lr: float = 1e-3,
    minibatches: int = 2,
    warm_start_steps: int = 150,
    warm_start_calls: float = 0.15,
    evaluate_every: int = 10,
    threads: int = 1,
) -> Graph:
    """Teaches a tiny transformer to use a calculator.

    steps               batches to train on
    max_staleness       maximum age of a sample, in policy versions; 0 is synchronous
    seed                seed of the model's weights and of all random numbers
    turns               the most turns of an episode; 1 leaves no turn for an answer after a call
    prompts_per_step    groups per batch
    samples_per_prompt  episodes per prompt
    lr                  learning rate at the start; it falls to 0 over the run
    minibatches         optimizer updates per batch
    warm_start_steps    supervised updates before GRPO
    warm_start_calls    fraction of first turns in them that call the calculator; the others answer at once
    evaluate_every      steps between evaluations on 1,000 held-out prompts
    threads             torch threads of sampler and learner, each
    """
    source = Generated("multiply", digits=4)
    shown = Calculated(source, calls=warm_start_calls)
    policy = Model(
        "tiny-qwen3",
        config=TINY_QWEN3,
        alphabet=shown.alphabet,
        warm_start=Supervised(shown, steps=warm_start_steps),
        seed=seed,
    )
    sampler = WorkerGroup("sampler", backend="torch", threads=threads)
    learner = WorkerGroup("learner", backend="torch", threads=threads)
    episode = Episode(
        policy,
        Calculator(),
        on=sampler,
        samples_per_prompt=samples_per_prompt,
        turns=turns,
        tokens=20,
        turn_tokens=8,
        stop=("=",),
        environments=1,
    )
    return Graph(
        name="tool",
        host=sampler,
        source=Prompts(source, batch=prompts_per_step),
        stages=(
            episode,
            Filter("complete"),
            Reward(exact_match),
            Advantage("group_relative"),
            Train(
                policy,
                on=learner,
                loss=ClippedLoss(correction=TruncatedIS(cap=2.0) if max_staleness else None),
                lr=lr,
                betas=(0.9, 0.95),
                schedule="cosine",
                minibatches=minibatches,
                prev="own",
            ),
            Refit(policy, source=learner, target=sampler),
            Evaluate(policy, source, on=sampler, episode=episode, every=evaluate_every),
        ),
        schedule=Schedule(steps=steps, max_staleness=max_staleness, seed=seed),
    )
