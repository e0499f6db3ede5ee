"""The cost of sampling through Sluice: its vLLM backend against vLLM alone, on one GPU, with the same prompts.

python -m benchmarks.gpu.rollout [--model 0.6B] [--groups 64] [--samples 8] [--tokens 1024] [--out FILE]

Both sample from softmax(logits) and return the logprob of each token; vLLM alone uses its own sampler, `LLM.generate`
and `n` samples per prompt. Each contender runs in a separate process, and the second of two rounds counts. The table
also has the time of one choice of tokens for the same number of rows, as in the logits processor, without an engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import SHAPES, add_work, model_of
from benchmarks.report import report
from pipeline import Model, StageContext, WorkerGroup
from stages.tasks import Generated

CONTENDERS = ("vLLM alone", "vllm backend", "choice")


def prompts(groups: int) -> list[str]:
    """Prompts of the generated task."""
    task = Generated("reverse")
    return [task.train(index, order=0)[0] for index in range(groups)]


def alone(options: argparse.Namespace, folder: Path) -> float:
    """Seconds of `LLM.generate`."""
    from stages.backends.vllm import environment

    environment.prepare(gpus=True, threads=1, tensor_parallel=1)  # the same model runner for both
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model_of(options.model, folder),
        dtype="bfloat16",
        gpu_memory_utilization=WorkerGroup("sampler").memory,
        disable_log_stats=True,
    )
    params = SamplingParams(
        n=options.samples, temperature=1.0, max_tokens=options.tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    for _ in range(2):
        begun_s = time.perf_counter()
        made = llm.generate(prompts(options.groups), params, use_tqdm=False)
        took_s = time.perf_counter() - begun_s
        print(f"a round took {took_s:.1f} s", file=sys.stderr, flush=True)
    assert all(len(one.token_ids) == options.tokens for each in made for one in each.outputs)
    return took_s


def ours(options: argparse.Namespace, folder: Path) -> float:
    """Seconds of the backend's `generate`."""
    from stages.backends import Draws, Sampling, engine

    group = WorkerGroup("sampler", backend="vllm", gpus=1, threads=1)
    context = StageContext(group=group, rank=0, seed=0, group_size=options.samples, run_dir=folder, shared={})
    backend, model = engine(context), Model(model_of(options.model, folder))
    texts = [text for text in prompts(options.groups) for _ in range(options.samples)]
    ids = backend.encode(model, texts)
    groups = tuple(i // options.samples for i in range(len(texts)))
    samples = tuple(i % options.samples for i in range(len(texts)))
    for seed in range(2):
        begun_s = time.perf_counter()
        made = backend.generate(model, ids, Sampling(options.tokens), Draws(seed, groups, samples))
        took_s = time.perf_counter() - begun_s
        print(f"a round took {took_s:.1f} s", file=sys.stderr, flush=True)
    print("tokens", sum(made.response_ids.lengths), file=sys.stderr)
    return took_s


def choice(options: argparse.Namespace, folder: Path) -> float:
    """Seconds to choose one token for every sample."""
    import torch

    from stages.backends import Sampling
    from stages.backends.choose import choose

    rows = options.groups * options.samples
    logits = torch.randn((rows, SHAPES[options.model]["vocab_size"]), device="cuda")
    numbers = torch.rand(rows, dtype=torch.float64, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        for _ in range(20):
            choose(logits, Sampling(1), numbers)
        torch.cuda.synchronize()
        took_s = (time.perf_counter() - begun_s) / 20
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--contender", choices=CONTENDERS, help="run only this one and print its seconds")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.contender:
        run = dict(zip(CONTENDERS, (alone, ours, choice)))[options.contender]
        with tempfile.TemporaryDirectory() as folder:
            print(f"took {json.dumps(run(options, Path(folder)))}", flush=True)
        return
    rows: list[dict[str, Any]] = []
    tokens = options.groups * options.samples * options.tokens
    for contender in CONTENDERS:
        command = [sys.executable, "-m", "benchmarks.gpu.rollout", *sys.argv[1:], "--contender", contender]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=400)
        if done.returncode:
            print(done.stdout[-3000:], file=sys.stderr)
            rows.append({"contender": f"{contender}: exit code {done.returncode}"})
            continue
        took_s = next(json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("took "))
        row = {"contender": contender, "s": round(took_s, 4)}
        if contender != "choice":
            row |= {"tokens/s": round(tokens / took_s), "ms per token of all": round(1000 * took_s / options.tokens, 2)}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        notes = f"{options.groups} x {options.samples} samples of {options.tokens} tokens, {options.model}."
        report("gpu.rollout", rows, ["contender", "s", "tokens/s", "ms per token of all"], notes, options.out)


if __name__ == "__main__":
    main()
