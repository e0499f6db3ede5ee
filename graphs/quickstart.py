"""GRPO on a small, randomly initialized Qwen3: two CPU cores, about a minute, no download.

python -m pipeline.run graphs/quickstart.py --task sort
"""

from typing import Literal

from ops.rewards import digit_match
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import (
    Advantage,
    ClippedLoss,
    Evaluate,
    Generated,
    PrevLogprobs,
    Prompts,
    Refit,
    Reward,
    Rollout,
    Supervised,
    Train,
    TransportName,
    TruncatedIS,
)

TINY_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rope_theta": 10.0,
    "initializer_range": 0.05,
    "embedding_std": 0.5,
    "tie_word_embeddings": False,
}


def graph(
    task: Literal["reverse", "sort", "add"] = "reverse",
    steps: int = 100,
    max_staleness: int = 0,
    on_stale: Literal["wait", "drop"] = "wait",
    refit: Literal["drain", "in_flight"] = "drain",
    refit_transport: TransportName = "auto",
    seed: int = 0,
    prompts_per_step: int = 32,
    samples_per_prompt: int = 16,
    lr: float = 1e-3,
    minibatches: int = 2,
    warm_start_steps: int = 600,
    warm_start_until: float = 0.25,
    evaluate_every: int = 20,
    threads: int = 2,
    generator: Literal["torch", "vllm"] = "torch",
    trainer: Literal["torch", "megatron"] = "torch",
) -> Graph:
    """Teaches a tiny transformer to reverse digits, to sort them, or to add two numbers.

    task                the task to learn
    steps               batches to train on
    max_staleness       maximum age of a sample, in policy versions; 0 is synchronous
    on_stale            whether to wait for slow samples or to drop samples that become too old
    refit               whether new weights wait for running sequences or are swapped between two tokens
    refit_transport     how new weights reach the sampler (stages/refit.py)
    seed                seed of the model's weights and of all random numbers
    prompts_per_step    groups per batch
    samples_per_prompt  responses per prompt
    lr                  learning rate at the start; it falls to 0 over the run
    minibatches         optimizer updates per batch
    warm_start_steps    maximum number of supervised updates before GRPO
    warm_start_until    fraction of correct answers at which they end; GRPO needs a model that is sometimes right
    evaluate_every      steps between evaluations on 1,000 held-out prompts
    threads             torch threads of sampler and learner, each
    generator           backend that samples
    trainer             backend that trains
    """
    source = Generated(task, digits=4)
    policy = Model(
        "tiny-qwen3",
        config=TINY_QWEN3,
        alphabet=source.alphabet,
        warm_start=Supervised(source, steps=warm_start_steps, until=warm_start_until),
        seed=seed,
    )
    sampler = WorkerGroup("sampler", backend=generator, threads=threads)
    learner = WorkerGroup("learner", backend=trainer, threads=threads)
    max_tokens = source.max_answer + 1
    loss = ClippedLoss(correction=TruncatedIS(cap=2.0) if max_staleness else None)
    return Graph(
        name="quickstart",
        host=sampler,
        source=Prompts(source, batch=prompts_per_step),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=samples_per_prompt, max_tokens=max_tokens),
            Reward(digit_match),
            PrevLogprobs(policy, on=learner),
            Advantage("group_relative"),
            Train(
                policy,
                on=learner,
                loss=loss,
                lr=lr,
                betas=(0.9, 0.95),
                schedule="cosine",
                minibatches=minibatches,
            ),
            Refit(policy, source=learner, target=sampler, transport=refit_transport),
            Evaluate(policy, source, on=sampler, every=evaluate_every, max_tokens=max_tokens),
        ),
        schedule=Schedule(steps=steps, max_staleness=max_staleness, on_stale=on_stale, refit=refit, seed=seed),
    )
