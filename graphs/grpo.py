"""GRPO for any Hugging Face causal language model and a JSONL file with the columns `prompt` and `answer`. Synchronous;
`graphs/grpo_async.py` changes one number to run asynchronously.

python -m pipeline.run graphs/grpo.py --model Qwen/Qwen3-0.6B --data train.jsonl

With `--on h200:2`, engines, GPUs and the length of packed rows are chosen for two H200, if their flags are not given.
"""

from collections.abc import Iterator
from typing import Literal

from ops.rewards import exact_match
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import (
    Advantage,
    ClippedLoss,
    Dynamic,
    LoRA,
    Packed,
    PrevLogprobs,
    Prompts,
    Refit,
    RefLogprobs,
    Reward,
    Rollout,
    Train,
    TransportName,
    TruncatedIS,
)

RECOMPUTED: dict[str, Literal[False, "mlp", True]] = {"none": False, "mlp": "mlp", "layers": True}


def graph(
    model: str = "Qwen/Qwen3-0.6B",
    data: str = "train.jsonl",
    chat: bool = False,
    generator: Literal["torch", "vllm"] = "torch",
    trainer: Literal["torch", "megatron"] = "torch",
    sampler_gpus: int = 0,
    learner_gpus: int = 0,
    colocated: bool = False,
    refit_transport: TransportName = "auto",
    sampler_weights: Literal["auto", "fp8"] = "auto",
    sampler_memory: float = 0.85,
    steps: int = 100,
    max_staleness: int = 0,
    seed: int = 0,
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    max_tokens: int = 512,
    microbatch: int = 8192,
    minibatches: int = 4,
    recompute: Literal["none", "mlp", "layers"] = "none",
    lora_rank: int = 0,
    lr: float = 1e-6,
    kl: float = 0.001,
) -> Graph:
    """Group-relative policy optimization with an exact-match reward.

    model               a folder, or a hub name
    data                a JSONL file
    chat                whether prompts are messages, or texts of a user, for a model with a chat template
    generator           backend that samples
    trainer             backend that trains
    sampler_gpus        GPUs that sample, one worker each; 0 is the CPU, and then learner_gpus is 0 too
    learner_gpus        GPUs that train, one worker each
    colocated           whether sampler and learner take turns on the same GPUs
    refit_transport     how new weights reach the sampler (stages/refit.py)
    sampler_weights     fp8: vllm on GPUs samples with 8-bit matrices
    sampler_memory      share of each GPU that vllm takes, at most; in turns, the trainer keeps the rest
    steps               batches to train on
    max_staleness       maximum age of a sample, in policy versions; 0 is synchronous
    seed                seed of all random numbers
    prompts_per_step    groups per batch
    samples_per_prompt  responses per prompt
    max_tokens          maximum tokens per response
    microbatch          tokens in one pass of the trainer, padding included; the longest prompt and max_tokens must fit
    minibatches         optimizer updates per batch
    recompute           what the trainer computes again in the backward pass, to need less memory: nothing, feed-forward
                        parts (megatron), or whole layers
    lora_rank           rank of an adapter that is trained in the place of the model (docs/lora.md); 0 trains the model
    lr                  learning rate; an adapter needs about ten times that of a whole model
    kl                  weight of the KL divergence from the model before training; above 0
    """
    policy = Model(model, lora=LoRA(rank=lora_rank) if lora_rank else None)
    sampler = WorkerGroup(
        "sampler", backend=generator, gpus=sampler_gpus, weights=sampler_weights, memory=sampler_memory
    )
    learner = WorkerGroup("learner", backend=trainer, gpus=learner_gpus, colocated=sampler if colocated else None)
    loss = ClippedLoss(kl=kl, correction=TruncatedIS(cap=2.0))  # its weights are 1 if nothing is stale
    passes = Packed(microbatch) if trainer == "megatron" else Dynamic(microbatch)  # little or no padding
    # Samples to score while others are still being sampled; 0 is all, in one turn of the GPUs or of the frozen weights.
    run = 0 if colocated else samples_per_prompt * max(4, learner_gpus)
    own = colocated or minibatches == 1  # nothing to score in advance: the first update's own pass has its old logprobs
    prev = () if own else (PrevLogprobs(policy, on=learner, microbatch=passes, at_once=run),)
    return Graph(
        name="grpo",
        source=Prompts(data, batch=prompts_per_step, chat=chat),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=samples_per_prompt, max_tokens=max_tokens, chat=chat),
            Reward(exact_match),
            *prev,
            RefLogprobs(policy.frozen(), on=learner, microbatch=passes, at_once=run if trainer == "torch" else 0),
            Advantage("group_relative"),
            Train(
                policy,
                on=learner,
                loss=loss,
                lr=lr,
                minibatches=minibatches,
                microbatch=passes,
                checkpoint_activations=RECOMPUTED[recompute],
                prev="own" if own else "field",
            ),
            Refit(policy, source=learner, target=sampler, transport=refit_transport),
        ),
        schedule=Schedule(steps=steps, max_staleness=max_staleness, seed=seed),
    )


def choices(gpus: int, prompts_per_step: int) -> Iterator[dict[str, object]]:
    """What to try for flags that are not given, if `--on` names GPUs: the fastest that fits is taken."""
    gpus = max(1, min(gpus, 2 * prompts_per_step))  # workers divide the prompts, and may share GPUs
    each = -(-gpus // 8)  # a few ways to divide many GPUs
    powers = [2**n for n in range(gpus.bit_length())]  # they divide most batches
    apart = [(n, gpus - n) for n in range(each, gpus, each)]
    apart += [(n, max(power for power in powers if power <= gpus - n)) for n in powers[-4:] if n < gpus]
    apart += [(1, 1)] if gpus > 2 else []  # for any number of prompts
    ways: list[dict[str, object]] = [
        {"sampler_gpus": n, "learner_gpus": n, "colocated": True, "sampler_memory": share}
        for n in dict.fromkeys((min(gpus, prompts_per_step), powers[-1]))
        for share in (0.85, 0.5, 0.3)
    ]
    ways += [{"sampler_gpus": n, "learner_gpus": learners, "colocated": False} for n, learners in dict.fromkeys(apart)]
    rows = [("none", tokens) for tokens in range(8192, 49153, 4096)]
    for recompute in ("mlp", "layers"):  # slower, so taken only where nothing else fits, such as the longest samples
        rows += [(recompute, tokens) for tokens in (8192, 12288, 20480, 36864, 69632, 135168)]
    for recompute, tokens in rows:
        for way in ways:
            yield {"generator": "vllm", "trainer": "megatron", "microbatch": tokens, "recompute": recompute, **way}
