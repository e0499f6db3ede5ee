"""An optimizer update with Megatron-core on one GPU: with every fused kernel, without each, and without any.

python -m benchmarks.gpu.update [--model 0.6B] [--samples 128] [--tokens 1024] [--budget 16384] [--updates 5]
                                [--only "all" "none"] [--profile] [--out FILE]

Random weights of a real model's shape, packed rows of `--budget` tokens, activations kept unless `--recompute mlp` or
`layers`. The table has medians over updates, after two that are not counted: milliseconds, prompt and response
tokens/s, model FLOP utilization (train/utilization as in a run's record: no padding, no recomputation; dense bfloat16
peak), the largest allocated GPU memory, and the first loss and gradient norm, which show that the kernels compute the
same. `score ms` is a pass without gradients. `--profile` adds milliseconds of an update by kind of kernel. Each line
is a process of its own. `--cpu` tries the script with a tiny model.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu.mixture import PROMPT, columns_of
from benchmarks.gpu.shapes import SHAPES, model_of
from benchmarks.report import report
from graphs.grpo import RECOMPUTED
from pipeline import Model, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Columns
from pipeline.declare.sharding import Packed
from stages import ClippedLoss, PrevLogprobs, Train

WARM = 2  # updates that are not counted
SWITCHES = ("attention", "rope", "gradients", "activation", "vocabulary", "layers", "optimizer")
VARIANTS = {  # by name: what is switched off
    "all": (),
    **{f"without {name}": (name,) for name in SWITCHES},
    "none": SWITCHES,
}
KERNELS = {  # by kind: the names of its kernels
    "attention": r"fmha|flash|sdpa|attn|attention",
    "vocabulary": r"_sums|_slopes",
    "matrix products": r"gemm|nvjet|cutlass|xmma",
    "norms": r"norm",
    "optimizer": r"adam|multi_tensor",
    "copies": r"copy|memcpy|cat|index|gather|scatter",
}


def switch_off(names: tuple[str, ...]) -> None:
    """Switch kernels off in this process: those of Transformer Engine and torch's compiler, of the vocabulary, and the
    optimizer's, in whose place torch's AdamW takes a kernel per operation and list of tensors."""
    import torch
    from megatron.core import optimizer

    from ops import vocab_parallel
    from stages.backends.megatron import fused

    on, off = fused.fused_on, {name: False for name in names if name not in ("vocabulary", "optimizer")}
    fused.fused_on = lambda groups: replace(on(groups), **off)  # type: ignore[assignment]
    if "vocabulary" in names:
        vocab_parallel.has_kernels = lambda tensor: False  # type: ignore[assignment]
    if "optimizer" in names:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True


def measured(name: str, path: str, options: argparse.Namespace) -> dict[str, Any]:
    """The line of one variant, measured in this process."""
    switch_off(VARIANTS[name])
    columns = columns_of(options, SHAPES[options.model]["vocab_size"])
    row, again = updates(path, Packed(options.budget), columns, options)
    row = {"kernels": name, **row}
    return row | profiled(again) if options.profile and not options.cpu else row


def updates(
    path: str, microbatch: Packed, columns: Columns, options: argparse.Namespace
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """The numbers of updates and of scoring with these columns in this process, and one update more. `options` are
    `cpu`, `recompute` and `updates`."""
    import torch

    learner = WorkerGroup("learner", backend="megatron", gpus=0 if options.cpu else 1)
    cut: Any = {"on": learner, "microbatch": microbatch}
    train = Train(Model(path), loss=ClippedLoss(), lr=1e-6, checkpoint_activations=RECOMPUTED[options.recompute], **cut)
    context = StageContext(group=learner, rank=0, seed=0, group_size=1, run_dir=None, shared={}, steps=100)
    runner, scorer = train.setup(context), PrevLogprobs(Model(path), **cut).setup(context)
    took_s, scored_s, records = [], [], []

    def timed(call: Any, stage: str, seconds: list[float]) -> Any:
        begun_s = time.perf_counter()
        made = call(columns, Task(stage=stage, step=len(seconds)))
        if not options.cpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun_s)
        return made

    for _ in range(WARM + options.updates):
        timed(scorer, "prev_logprobs", scored_s)
        records.append(timed(runner, "train", took_s).metrics)
    update_s = statistics.median(took_s[WARM:])
    given: Any = columns
    tokens = sum(given["prompt_ids"].lengths) + sum(given["response_ids"].lengths)
    row = {
        "ms/update": round(1e3 * update_s, 1),
        "score ms": round(1e3 * statistics.median(scored_s[WARM:]), 1),
        "tokens/s": round(tokens / update_s),
        "MFU %": round(100 * statistics.median(record.get("utilization", 0.0) for record in records[WARM:]), 2),
        "peak GiB": round(0.0 if options.cpu else torch.cuda.max_memory_allocated() / 2**30, 1),
        "first loss": records[0]["loss"],
        "first grad norm": records[0]["grad_norm"],
    }
    shared = 100 * records[0]["shared"]
    return row | ({"not computed %": round(shared, 1)} if shared else {}), lambda: runner(
        columns, Task(stage="train", step=0)
    )


def profiled(call: Any) -> dict[str, float]:
    """Milliseconds of one call by kind of kernel. Prints the largest of no kind, and where the host spends its time."""
    from torch.profiler import ProfilerActivity, profile

    with cProfile.Profile() as host:
        call()
    pstats.Stats(host).sort_stats("tottime").print_stats(25)

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
    spent = dict.fromkeys([*KERNELS, "other"], 0.0)
    others: dict[str, float] = {}
    for event in profiler.key_averages():
        taken_ms = event.self_device_time_total / 1e3
        kind = next((kind for kind, names in KERNELS.items() if re.search(names, event.key, re.IGNORECASE)), "other")
        spent[kind] += taken_ms
        if kind in ("other", "copies"):
            others[event.key[:150]] = taken_ms
    for key, taken_ms in sorted(others.items(), key=lambda item: -item[1])[:14]:
        print(f"    {taken_ms:8.1f} ms  {key}", flush=True)
    return {f"{kind} ms": round(taken_ms, 1) for kind, taken_ms in spent.items()}


def add_updates(parser: argparse.ArgumentParser, variants: Collection[str]) -> None:
    """Add the flags of how to update, and of which of the variants."""
    parser.add_argument("--budget", type=int, default=16384, help="tokens per packed row")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--recompute", choices=RECOMPUTED, default="none", help="what the backward pass computes again")
    parser.add_argument("--only", nargs="+", choices=variants, default=list(variants), help="these lines")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", help="write JSON here")


def lines(
    measure: Callable[[str, str, argparse.Namespace], dict[str, Any]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the line of each variant that `options` name, measured with the model's folder in a process of its own."""
    import torch  # noqa: F401 - so that the report names the GPU

    with tempfile.TemporaryDirectory() as folder:
        path = model_of(options.model, Path(folder))
        for name in options.only:
            with ProcessPoolExecutor(1, get_context("spawn")) as own:
                yield own.submit(measure, name, path, options).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.6B")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024, help="of each response")
    parser.add_argument("--profile", action="store_true", help="add the time by kind of kernel")
    add_updates(parser, VARIANTS)
    options = parser.parse_args()
    if options.cpu:
        options.model, options.samples, options.tokens, options.budget = "tiny", 4, 32, 128
    notes = (
        f"{options.model}; one update of {options.samples} samples of {PROMPT} + {options.tokens} tokens in rows of "
        f"{options.budget}, recomputed: {options.recompute}; medians of {options.updates}."
    )
    rows: list[dict[str, Any]] = []
    for row in lines(measured, options):
        rows.append(row)
        report("gpu.update", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
