"""The cost of sampling through Sluice: its vLLM backend against vLLM alone, on one GPU, with the same prompts.

python -m benchmarks.gpu.rollout [--model 0.6B] [--groups 64] [--samples 8] [--tokens 1024] [--weights fp8] [--out FILE]
python -m benchmarks.gpu.rollout --speculate 4 [--draft 0.6B] [--temperature 0.3]
python -m benchmarks.gpu.rollout --gpus 0 --model tiny --groups 4 --samples 4 --tokens 256 --speculate 4 \\
    --temperature 0.05

With --weights fp8 the backend samples with 8-bit matrices, and vLLM alone still with the model's own.

With --speculate there is a row of the backend with drafts, by n-grams or by the model --draft: random weights, of the
same seed, so a draft of the same shape is always right, and one of another shape never is. Weights that were never
trained repeat themselves at a low temperature, which is what n-grams find.

All sample from softmax(logits / temperature) and return the logprob of each token; vLLM alone uses its own sampler,
`LLM.generate` and `n` samples per prompt. Each contender runs in a separate process, and the second of two rounds
counts. The table also has the time of one choice of tokens for the same number of rows, as in the logits processor,
without an engine.
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
from pipeline.declare.group import WEIGHTS
from stages.tasks import Generated

CONTENDERS = ("vLLM alone", "vllm backend", "vllm backend with drafts", "choice")


def prompts(groups: int) -> list[str]:
    """Prompts of the generated task."""
    task = Generated("reverse")
    return [task.train(index, order=0)[0] for index in range(groups)]


def alone(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of `LLM.generate`."""
    from stages.backends.vllm import environment

    gpus = options.gpus > 0
    environment.prepare(gpus=gpus, threads=1, tensor_parallel=1)  # the same model runner for both
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model_of(options.model, folder),
        dtype="bfloat16" if gpus else "float32",
        gpu_memory_utilization=WorkerGroup("sampler").memory if gpus else 0.1,
        enforce_eager=not gpus,
        disable_log_stats=True,
    )
    params = SamplingParams(
        n=options.samples, temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True, logprobs=0,
        detokenize=False,
    )  # fmt: skip
    for _ in range(2):
        begun_s = time.perf_counter()
        made = llm.generate(prompts(options.groups), params, use_tqdm=False)
        took_s = time.perf_counter() - begun_s
        print(f"a round took {took_s:.1f} s", file=sys.stderr, flush=True)
    assert all(len(one.token_ids) == options.tokens for each in made for one in each.outputs)
    return {"s": took_s}


def drafted(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of the backend's `generate` with drafts, and the tokens that a sample gains in a pass of the model."""
    draft = Model(model_of(options.draft, folder)) if options.draft else None
    return ours(options, folder, speculate=options.speculate, draft=draft)


def ours(options: argparse.Namespace, folder: Path, **speculation: Any) -> dict[str, float]:
    """Seconds of the backend's `generate`."""
    from stages.backends import Draws, Sampling, engine

    group = WorkerGroup("sampler", backend="vllm", gpus=options.gpus, threads=1, weights=options.weights, **speculation)
    context = StageContext(group=group, rank=0, seed=0, group_size=options.samples, run_dir=folder, shared={})
    backend, model = engine(context), Model(model_of(options.model, folder))
    texts = [text for text in prompts(options.groups) for _ in range(options.samples)]
    ids = backend.encode(model, texts)
    groups = tuple(i // options.samples for i in range(len(texts)))
    samples = tuple(i % options.samples for i in range(len(texts)))
    for seed in range(2):
        begun_s = time.perf_counter()
        sampling = Sampling(options.tokens, options.temperature)
        made = backend.generate(model, ids, sampling, Draws(seed, groups, samples))
        took_s = time.perf_counter() - begun_s
        print(f"a round took {took_s:.1f} s", file=sys.stderr, flush=True)
    tokens = sum(made.response_ids.lengths)
    print("tokens", tokens, file=sys.stderr)
    return {"s": took_s, **({"tokens per pass": round(tokens / made.passes, 2)} if made.passes else {})}


def choice(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds to choose one token for every sample."""
    import torch

    from stages.backends import Sampling
    from stages.backends.choose import choose

    rows, device = options.groups * options.samples, "cuda" if options.gpus else "cpu"
    logits = torch.randn((rows, SHAPES[options.model]["vocab_size"]), device=device)
    numbers = torch.rand(rows, dtype=torch.float64, device=device)
    wait = torch.cuda.synchronize if options.gpus else int
    for _ in range(2):
        wait()
        begun_s = time.perf_counter()
        for _ in range(20):
            choose(logits, Sampling(1, options.temperature), numbers)
        wait()
        took_s = (time.perf_counter() - begun_s) / 20
    return {"s": took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=1, help="0: on the CPU")
    parser.add_argument("--weights", choices=WEIGHTS, default="auto", help="number format of the backend's matrices")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--speculate", type=int, default=0, help="tokens that are drafted per step")
    parser.add_argument("--draft", choices=SHAPES, help="the model that drafts; without it, n-grams do")
    parser.add_argument("--contender", choices=CONTENDERS, help="run only this one and print its seconds")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.weights != "auto" and not options.gpus:
        parser.error(f"--weights {options.weights}: only vLLM on GPUs has such weights")
    if options.contender:
        run = dict(zip(CONTENDERS, (alone, ours, drafted, choice)))[options.contender]
        with tempfile.TemporaryDirectory() as folder:
            print(f"took {json.dumps(run(options, Path(folder)))}", flush=True)
        return
    import torch  # noqa: F401 - so that the report names the GPU

    rows: list[dict[str, Any]] = []
    tokens = options.groups * options.samples * options.tokens
    for contender in CONTENDERS if options.speculate else (*CONTENDERS[:2], CONTENDERS[3]):
        command = [sys.executable, "-m", "benchmarks.gpu.rollout", *sys.argv[1:], "--contender", contender]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=400)
        if done.returncode:
            print(done.stdout[-3000:], file=sys.stderr)
            rows.append({"contender": f"{contender}: exit code {done.returncode}"})
            continue
        found = next(json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("took "))
        took_s = found["s"]
        row = {"contender": contender, **found, "s": round(took_s, 4)}
        if contender != "choice":
            row |= {"tokens/s": round(tokens / took_s), "ms per token of all": round(1000 * took_s / options.tokens, 2)}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        notes = f"{options.groups} x {options.samples} samples of {options.tokens} tokens, {options.model}, "
        notes += f"temperature {options.temperature:g}; the backend's weights are {options.weights}."
        if options.speculate:
            notes += f" {options.speculate} drafts per step by {options.draft or 'n-grams'}."
        columns = ["contender", "s", "tokens/s", "ms per token of all", "tokens per pass"]
        report("gpu.rollout", rows, columns if options.speculate else columns[:4], notes, options.out)


if __name__ == "__main__":
    main()
