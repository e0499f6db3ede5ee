"""Seconds per step of the quickstart's GRPO: by hand, in process, on Ray and TransferQueue, and TRL's trainer.

python -m benchmarks.step_time [--steps 40] [--rounds 3] [--threads 2] [--out FILE]

Every contender trains the same warm-started model on the same prompts with the same batch and seed, in a separate
process, one after the other in each round. A step is everything from one version of the weights to the next: rollout,
rewards, previous-policy logprobs, advantages, two updates of half a batch each, and the refit, if there is one. With
own logprobs, `Train(prev="own")` takes the place of the stage: the first update's own pass computes them, and only the
second half of the batch is scored before. Steps in the first quarter of a process are not counted.

Aim, malloc tuned in all: Ray + TransferQueue at most TRL's time, local at most 1.1 times that of the loop by hand.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.report import report
from graphs import quickstart
from pipeline import Graph
from stages import Train

PROMPTS, SAMPLES, LR, SEED, WARM_STEPS, MINIBATCHES = 32, 16, 2e-3, 0, 40, 2
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": str(2**26)}
CONTENDERS = {
    "by hand": {},
    "by hand, malloc tuned": TUNED,
    "local": {},
    "local, own logprobs": {},
    "Ray + TransferQueue": {},
    "Ray + TransferQueue, own logprobs": {},
    "TRL GRPOTrainer": {},
    "TRL GRPOTrainer, malloc tuned": TUNED,
}


def described(steps: int, threads: int, *, own: bool = False) -> Graph:
    """The quickstart without evaluation, on worker groups of `threads` threads, with own logprobs or with a stage."""
    graph = quickstart.graph(
        steps=steps, seed=SEED, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, lr=LR, threads=threads,
        warm_start_steps=WARM_STEPS, warm_start_until=1.0, minibatches=MINIBATCHES,
    )  # fmt: skip
    out = {"evaluate", "prev_logprobs"} if own else {"evaluate"}
    kept = (stage for stage in graph.stages if stage.name not in out)
    stages = tuple(replace(stage, prev="own") if own and isinstance(stage, Train) else stage for stage in kept)
    return replace(graph, stages=stages)


def by_hand(steps: int, threads: int) -> list[float]:
    """Seconds of each step of the tests' hand-written loop."""
    import torch

    from tests.integration import handwritten
    from tests.integration.same_settings import reverse_settings

    torch.set_num_threads(threads)
    ends_s: list[float] = []
    settings = reverse_settings(
        steps=steps,
        prompts=PROMPTS,
        samples=SAMPLES,
        minibatches=MINIBATCHES,
        lr=LR,
        warm_steps=WARM_STEPS,
        seed=SEED,
    )
    handwritten.run(settings, on_step=lambda: ends_s.append(time.perf_counter()))
    return _between(ends_s)


def ours(steps: int, threads: int, executor_name: str, *, own: bool) -> list[float]:
    """Seconds between published versions of a run."""
    from pipeline.engine.driver import Driver
    from pipeline.plan.planner import plan
    from pipeline.record import trace
    from pipeline.rundir import RunDir

    if executor_name == "local":
        from pipeline.executors.local import LocalExecutor as Executor
    else:
        from pipeline.executors.ray import RayExecutor as Executor  # type: ignore[assignment]
    graph = described(steps, threads, own=own)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder)).create()
        Driver(graph, plan(graph)[0], Executor(), run_dir=run_dir).execute()
        return _between([e.at_s for _, e in trace.read(run_dir.events) if isinstance(e, trace.Published)])


def trl(steps: int, threads: int) -> list[float]:
    """Seconds of each step of TRL's trainer with the same model, prompts and reward."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from ops.rewards import digit_match
    from stages import Generated
    from stages.backends.model.build import load_network, load_tokenizer

    torch.set_num_threads(threads)
    task = Generated("reverse", digits=4)
    policy = described(steps, threads).stages[0].model  # type: ignore[attr-defined]
    tokenizer = load_tokenizer(policy)
    network = load_network(policy, tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    pairs = [task.train(index, order=SEED) for index in range(steps * PROMPTS)]
    ends_s: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends_s.append(time.perf_counter())

    def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [digit_match(text, right) for text, right in zip(completions, answer)]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=steps * MINIBATCHES, num_generations=SAMPLES,
            per_device_train_batch_size=PROMPTS * SAMPLES // MINIBATCHES, steps_per_generation=MINIBATCHES,
            max_completion_length=task.max_answer + 1, learning_rate=LR, lr_scheduler_type="constant", beta=0.0,
            temperature=1.0, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=SEED, shuffle_dataset=False,
            max_grad_norm=1.0, loss_type="dapo",
        )  # fmt: skip
        dataset = Dataset.from_dict({"prompt": [p for p, _ in pairs], "answer": [a for _, a in pairs]})
        GRPOTrainer(
            model=network, args=config, train_dataset=dataset, reward_funcs=reward, processing_class=tokenizer,
            callbacks=[Clock()],
        ).train()  # fmt: skip
    return _between(ends_s[::MINIBATCHES])


def _between(ends_s: Iterable[float]) -> list[float]:
    return [b - a for a, b in pairwise(ends_s)]


def contend(name: str, steps: int, threads: int) -> list[float]:
    """Run one contender in this process."""
    own = name.endswith("own logprobs")
    runs: dict[str, Callable[[], list[float]]] = {
        "by hand": lambda: by_hand(steps, threads),
        "local": lambda: ours(steps, threads, "local", own=own),
        "Ray + TransferQueue": lambda: ours(steps, threads, "ray", own=own),
        "TRL GRPOTrainer": lambda: trl(steps, threads),
    }
    return runs[name.partition(",")[0]]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="torch threads of each process")
    parser.add_argument("--contender", choices=CONTENDERS, help="run only this one and print its steps as JSON")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(contend(options.contender, options.steps, options.threads)))
        return
    names = [name for name in CONTENDERS if not name.startswith("TRL") or importlib.util.find_spec("trl")]
    medians_s: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            command = [sys.executable, "-m", "benchmarks.step_time", "--contender", name]
            command += ["--steps", str(options.steps), "--threads", str(options.threads)]
            environment = os.environ | CONTENDERS[name] | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
            steps_s = json.loads(done.stdout.strip().splitlines()[-1])
            medians_s[name].append(statistics.median(steps_s[len(steps_s) // 4 :]))
            print(f"{name}: {medians_s[name][-1] * 1e3:.1f} ms", file=sys.stderr, flush=True)
    base_s = statistics.median(medians_s["by hand, malloc tuned"])
    rows = []
    for name in names:
        step_s = statistics.median(medians_s[name])
        spread = f"{min(medians_s[name]) * 1e3:.1f} to {max(medians_s[name]) * 1e3:.1f}"
        rows.append(
            {
                "contender": name,
                "ms per step": round(step_s * 1e3, 1),
                "rounds": spread,
                "x by hand, tuned": step_s / base_s,
            }
        )
    notes = (
        f"Medians over {options.rounds} interleaved rounds of {options.steps} steps; {PROMPTS} x {SAMPLES} samples of "
        f"6 + 5 tokens, {MINIBATCHES} updates, {options.threads} threads. "
        "local and Ray + TransferQueue tune malloc themselves."
    )
    report("step_time", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
