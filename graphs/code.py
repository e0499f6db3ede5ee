"""GRPO on programs: a tiny model learns to write expressions that pass hidden tests. Two CPU cores, a minute or two.

python -m pipeline.run graphs/code.py

The model sees p372> and has to write an expression of x in Python with the value of 3x^2 + 7x + 2. Before GRPO it
mostly writes 3*x+7*x+2. Only hidden tests tell it that this is wrong: a program with the expression runs in a sandbox.
"""

from graphs.quickstart import TINY_QWEN3
from ops.rewards import PassesTests
from ops.sandbox import SandboxLimits
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import (
    Advantage,
    ClippedLoss,
    Evaluate,
    Generated,
    Programmed,
    Prompts,
    Refit,
    Reward,
    Rollout,
    Supervised,
    Train,
    TruncatedIS,
)

AROUND = "x = int(input())\nprint({program})\n"


def graph(
    steps: int = 20,
    max_staleness: int = 0,
    seed: int = 0,
    prompts_per_step: int = 16,
    samples_per_prompt: int = 8,
    lr: float = 1e-3,
    minibatches: int = 2,
    warm_start_steps: int = 150,
    warm_start_right: float = 0.15,
    evaluate_every: int = 10,
    evaluate_prompts: int = 100,
    seconds: float = 5.0,
    threads: int = 1,
) -> Graph:
    """Teaches a tiny transformer to write expressions.

    steps               batches to train on
    max_staleness       maximum age of a sample, in policy versions; 0 is synchronous
    seed                seed of the model's weights and of all random numbers
    prompts_per_step    groups per batch
    samples_per_prompt  programs per prompt
    lr                  learning rate at the start; it falls to 0 over the run
    minibatches         optimizer updates per batch
    warm_start_steps    supervised updates before GRPO
    warm_start_right    fraction of right expressions in them
    evaluate_every      steps between evaluations on held-out prompts
    evaluate_prompts    held-out prompts, 200 at most
    seconds             until a program is killed
    threads             torch threads of sampler and learner, each
    """
    source = Generated("program", digits=3, held_out=200)
    shown = Programmed(source, right=warm_start_right)
    policy = Model(
        "tiny-qwen3",
        config=TINY_QWEN3,
        alphabet=shown.alphabet,
        warm_start=Supervised(shown, steps=warm_start_steps),
        seed=seed,
    )
    sampler = WorkerGroup("sampler", backend="torch", threads=threads)
    learner = WorkerGroup("learner", backend="torch", threads=threads)
    max_tokens = source.max_answer + 1
    tests = PassesTests(
        command=("python3", "-S", "main.py"),  # without site-packages Python starts in half the time
        around=AROUND,
        forks=True,
        limits=SandboxLimits(seconds=seconds, cpu_s=2, memory_bytes=256 << 20),
    )
    return Graph(
        name="code",
        source=Prompts(source, batch=prompts_per_step),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=samples_per_prompt, max_tokens=max_tokens),
            Reward(tests),
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
            Evaluate(
                policy,
                source,
                on=sampler,
                reward=tests,
                every=evaluate_every,
                prompts=evaluate_prompts,
                max_tokens=max_tokens,
            ),
        ),
        schedule=Schedule(steps=steps, max_staleness=max_staleness, seed=seed),
    )
