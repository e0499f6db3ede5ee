"""The torch backend on GPUs: a GRPO step of a model of Qwen3-0.6B's shape, in bfloat16.

python -m benchmarks.gpu.torch_backend [--steps 4] [--out FILE]
python -m benchmarks.gpu.torch_backend --ray --workers 2 [--fully-sharded]     # 2 GPUs sample, 2 train

In one process, sampler and learner share a GPU; on Ray, each worker has its own. The weights are random, so nothing is
learned: the run shows that the backend works on GPUs, how far the sampler's logprobs are from the trainer's in
bfloat16, and where the time goes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import report
from ops.rewards import digit_match
from pipeline import Graph, Model, Schedule, WorkerGroup
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from stages import (
    Advantage,
    ClippedLoss,
    Generated,
    PrevLogprobs,
    Prompts,
    Refit,
    RefLogprobs,
    Reward,
    Rollout,
    Train,
)

QWEN3_06B = {  # huggingface.co/Qwen/Qwen3-0.6B, config.json, with the vocabulary of the task
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


def graph(steps: int, gpus: int, config: dict, max_tokens: int, workers: int = 1, fully_sharded: bool = False) -> Graph:
    """GRPO with a frozen reference model; one GPU per worker, or a shared one in one process."""
    source = Generated("reverse", digits=4)
    policy = Model("qwen3-0.6b-shape", config=config, alphabet=source.alphabet)
    sampler = WorkerGroup("sampler", backend="torch", workers=workers, gpus=gpus)
    learner = WorkerGroup("learner", backend="torch", workers=workers, gpus=gpus, fully_sharded=fully_sharded)
    return Graph(
        name="gpu",
        source=Prompts(source, batch=16),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=8, max_tokens=max_tokens),
            Reward(digit_match),
            PrevLogprobs(policy, on=learner, microbatch=32),
            RefLogprobs(policy.frozen(), on=learner, microbatch=32),
            Advantage("group_relative"),
            Train(policy, on=learner, loss=ClippedLoss(kl=0.001), lr=1e-6, minibatches=2, microbatch=32),
            Refit(policy, source=learner, target=sampler),
        ),
        schedule=Schedule(steps=steps),
    )


def executor(on_ray: bool) -> Any:
    """The executor."""
    if not on_ray:
        return LocalExecutor()
    from pipeline.executors.ray import RayExecutor

    return RayExecutor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--ray", action="store_true", help="actors and TransferQueue instead of one process")
    parser.add_argument("--workers", type=int, default=1, help="workers of the sampler, and of the learner")
    parser.add_argument("--fully-sharded", action="store_true", help="shard the learner's weights over its workers")
    parser.add_argument("--cpu", action="store_true", help="a two-layer model on the CPU, to try the script")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    config = QWEN3_06B | ({"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64} if options.cpu else {})
    gpus = 0 if options.cpu else options.workers
    described = graph(options.steps, gpus, config, options.max_tokens, options.workers, options.fully_sharded)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder)).create()
        Driver(described, plan(described)[0], executor(options.ray), run_dir=run_dir).execute()
        lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    names = ["step", "time/step_s", "time/rollout_s", "time/prev_logprobs_s", "time/ref_logprobs_s", "time/train_s"]
    names += ["time/refit_s", "rollout/length_mean", "train/mismatch_kl", "train/kl", "train/grad_norm"]
    names += ["train/tflops_per_s"] + ([] if options.cpu else ["train/utilization"])
    rows = [{name: line[name] for name in names} for line in lines if line["step"] > 0]
    memory = ""
    if not (options.cpu or options.ray):
        import torch

        memory = f" Peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB."
    where = "in one process" if not options.ray else f"on Ray, {options.workers} workers per group"
    where += ", fully sharded" if options.fully_sharded else ""
    notes = f"16 prompts x 8 samples, {options.max_tokens} tokens at most, bfloat16, {where}.{memory}"
    report("gpu.torch_backend", rows, names, notes, options.out)


if __name__ == "__main__":
    main()
