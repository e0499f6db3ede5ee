"""Updates of a mixture of experts with Megatron-core: all experts in one grouped layer, or one by one.

python -m benchmarks.gpu.mixture [--experts grouped "one by one"] [--samples 32] [--tokens 1024] [--budget 8192 33000]
                                 [--updates 5] [--out FILE]

Two layers of Qwen3-30B-A3B's true shape (128 experts, 8 per token) with random weights, in Transformer Engine's layers
on one GPU. The table has medians over updates, after two that are not counted: milliseconds, prompt and response
tokens/s, model FLOP utilization (train/tflops_per_s and train/utilization as in a run's record: no padding, no
recomputation, only the chosen experts; dense bfloat16 peak), and the largest allocated GPU memory. `--budget` is tokens
per packed row. Each line is a process of its own. `--cpu` tries the script with a tiny model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import MIXTURES, model_of
from benchmarks.report import report
from pipeline import Model, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.sharding import Packed
from stages import ClippedLoss, Train

KINDS = ("grouped", "one by one")
PROMPT = 6  # tokens
WARM = 2  # updates that are not counted


def columns_of(options: argparse.Namespace, vocabulary: int) -> Columns:
    """A batch of random tokens, as sampled by about the policy that is trained."""
    import torch

    prompts, responses = (PROMPT,) * options.samples, (options.tokens,) * options.samples
    count, made = sum(responses), torch.Generator().manual_seed(0)
    logprobs = Ragged(torch.full((count,), -12.0), responses)
    return {
        "prompt_ids": Ragged(torch.randint(0, vocabulary, (sum(prompts),), generator=made), prompts),
        "response_ids": Ragged(torch.randint(0, vocabulary, (count,), generator=made), responses),
        "advantage": torch.randn(options.samples, generator=made),
        "prev_logprobs": logprobs,
        "rollout_logprobs": logprobs,
        "token_versions": Ragged(torch.zeros(count, dtype=torch.int32), responses),
    }


def measured(kind: str, budget: int, path: str, options: argparse.Namespace) -> dict[str, Any]:
    """The line of one kind of experts and one length of packed rows, measured in this process."""
    import torch

    from stages.backends.megatron import fused

    on = fused.fused_on
    fused.fused_on = lambda groups: replace(on(groups), experts=kind == "grouped")  # type: ignore[assignment]
    learner = WorkerGroup("learner", backend="megatron", gpus=0 if options.cpu else 1)
    stage = Train(Model(path), on=learner, loss=ClippedLoss(), lr=1e-6, microbatch=Packed(budget))
    context = StageContext(group=learner, rank=0, seed=0, group_size=1, run_dir=None, shared={}, steps=100)
    runner, columns = stage.setup(context), columns_of(options, MIXTURES[options.model]["vocab_size"])
    took_s, records = [], []
    for step in range(WARM + options.updates):
        begun_s = time.perf_counter()
        records.append(runner(columns, Task(stage="train", step=step)).metrics)
        took_s.append(time.perf_counter() - begun_s)
    update_s = statistics.median(took_s[WARM:])
    tokens = options.samples * (PROMPT + options.tokens)

    def median(name: str) -> float:
        return statistics.median(record.get(name, 0.0) for record in records[WARM:])

    return {
        "experts": kind,
        "tokens/row": budget,
        "ms/update": round(1e3 * update_s, 1),
        "tokens/s": round(tokens / update_s),
        "TFLOP/s": round(median("tflops_per_s"), 2),
        "MFU %": round(100 * median("utilization"), 2),
        "peak GiB": round(0.0 if options.cpu else torch.cuda.max_memory_allocated() / 2**30, 1),
        "first loss": records[0]["loss"],
        "first grad norm": records[0]["grad_norm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024, help="of each response")
    parser.add_argument("--budget", type=int, nargs="+", default=[8192, 33000], help="tokens per packed row")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    options.model = "tiny-mixture" if options.cpu else "30B-A3B-2-layers"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = model_of(options.model, Path(folder))
        for budget, kind in product(options.budget, options.experts):
            with ProcessPoolExecutor(1, get_context("spawn")) as own:
                rows.append(own.submit(measured, kind, budget, path, options).result())
    import torch  # noqa: F401 - so that the report names the GPU

    notes = (
        f"{options.model}; one update of {options.samples} samples of {PROMPT} + {options.tokens} tokens, "
        f"bfloat16; medians of {options.updates} updates."
    )
    report("gpu.mixture", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
