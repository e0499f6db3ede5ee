"""Data parallelism and packing of the torch backend: one optimizer update of a model of Qwen3-0.6B's shape.

python -m benchmarks.gpu.data_parallel [--ranks 1 2 4] [--out FILE]

The same frozen batch, with a heavy tail of lengths, is divided with every method and over every number of ranks (one
GPU and one process each, gradients over NCCL). Time is the median of the updates after the first. `gradient` is the
relative distance of the accumulated gradient from that of one rank with plain microbatches: the rounding of bfloat16;
`--float32` shows that there is no other difference. `--cpu` tries the script with gloo and a tiny model in float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import report
from pipeline.declare.sharding import Dynamic, Microbatching, Packed, Plain, Sharding, balance, waste

UPDATES = 4
SAMPLES = 64
DEADLINE_S = 240.0


def ways(budget: int) -> dict[str, tuple[Microbatching, bool]]:
    """By name: how the batch is divided, and whether the weights are sharded."""
    return {
        "plain, 8 samples": (Plain(8), False),
        "dynamic": (Dynamic(budget), False),
        "packed": (Packed(budget), False),
        "packed, fully sharded": (Packed(budget), True),
    }


def lengths(longest: int) -> dict[str, list[int]]:
    """Prompt (P) and response (T) lengths: lognormal responses with sigma 1, cut at `longest`."""
    import random

    draw = random.Random(0)
    prompts = [draw.randint(longest // 16, longest // 4) for _ in range(SAMPLES)]
    responses = [min(max(int(draw.lognormvariate(0.0, 1.0) * longest / 8), 1), longest) for _ in range(SAMPLES)]
    return {"P": prompts, "T": responses}


def rank_main(rank: int, size: int, port: int, options: Any, out: str) -> None:
    """Measure all methods on one rank; rank 0 writes the results."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if options.cpu else str(rank)  # one GPU per process, as under Ray
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    from pipeline.declare.ranks import RankLayout, Ranks, reach_store

    torch.set_num_threads(1 if options.cpu else 4)
    ranks = Ranks()
    if size > 1:
        store = reach_store("127.0.0.1", port, size, deadline_s=DEADLINE_S)
        device = "cpu" if options.cpu else "cuda"
        ranks = Ranks.join(RankLayout(data=size), rank, store, device=device, deadline_s=DEADLINE_S)
    rows = []
    for name, (microbatching, divided) in ways(options.budget).items():
        if divided and size == 1:
            continue
        rows.append(measure(name, microbatching, divided, ranks, options, Path(out)))
        if rank == 0:
            print(f"{size} ranks, {name}: {rows[-1]['update_s']} s/update", file=sys.stderr, flush=True)
    if rank == 0:
        torch.save(rows, Path(out) / f"{size}.pt")
    ranks.leave()


def measure(
    name: str, microbatching: Microbatching, divided: bool, ranks: Any, options: Any, out: Path
) -> dict[str, Any]:
    """Measure one method on this rank."""
    import torch

    from stages import ClippedLoss
    from stages.backends import Batch, Optimization
    from stages.backends.model.sharded import divide, whole
    from stages.backends.torch.optimize import TorchLearner

    network = build(options)
    if divided:
        divide(network.float(), ranks, torch.float32 if exact(options) else torch.bfloat16)
    learner = TorchLearner(network, Optimization(lr=1e-6, checkpoint_activations=not options.cpu), pad=0, ranks=ranks)
    sizes = lengths(options.longest)
    shards = Sharding.of(microbatching).shards(sizes, ranks.layout.data)
    shard = shards[ranks.rank]
    batch: Batch = frozen_batch(sizes).at(shard.index)
    gradient: dict[str, torch.Tensor] = {}
    step = learner._step

    def look(*given: Any) -> None:
        if not gradient:
            gradient.update({key: whole(p.grad).float().cpu() for key, p in learner.masters.items()})
        step(*given)

    learner._step = look  # type: ignore[method-assign]
    taken_s = []
    if not options.cpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(UPDATES):
        ranks.gather(0)
        start_s = time.monotonic()
        learner.update(batch, ClippedLoss(), temperature=1.0, update=shard.updates[0], packed=shard.packed)
        if not options.cpu:
            torch.cuda.synchronize()
        taken_s.append(time.monotonic() - start_s)
    peak = 0.0 if options.cpu else torch.cuda.max_memory_allocated() / 2**30
    reference = out / "gradient.pt"
    if not reference.exists():
        torch.save(gradient, reference)
    expected = torch.load(reference)
    distance = sum(float((gradient[key] - expected[key]).square().sum()) for key in expected) ** 0.5
    norm = sum(float(value.square().sum()) for value in expected.values()) ** 0.5
    tokens = sum(sizes["P"]) + sum(sizes["T"])
    median_s = statistics.median(taken_s[1:])
    return {
        "ranks": ranks.layout.data,
        "way": name,
        "update_s": round(median_s, 3),
        "tokens_per_s": round(tokens / median_s),
        "microbatches": len(shard.updates[0].microbatches),
        "padding": round(waste(shards, sizes["P"], sizes["T"]), 3),
        "balance": round(balance(shards, sizes["P"], sizes["T"]), 3),
        "peak_gib": round(peak, 1),
        "gradient": f"{distance / norm:.1e}",
    }


def exact(options: Any) -> bool:
    """Whether it computes in float32."""
    return options.cpu or options.float32


def build(options: Any) -> Any:
    """The network, the same on every rank."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu.torch_backend import QWEN3_06B

    small = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = QWEN3_06B | (small | {"num_key_value_heads": 2} if options.cpu else {}) | {"vocab_size": 8192}
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config),
        attn_implementation="sdpa",
        dtype=torch.float32 if exact(options) else torch.bfloat16,
    )
    return network.to("cpu" if options.cpu else "cuda").eval()


def frozen_batch(sizes: dict[str, list[int]]) -> Any:
    """Random tokens, with logprobs of a slightly different policy."""
    import torch

    from pipeline.declare.columns import Ragged
    from stages.backends import Batch

    draw = torch.Generator().manual_seed(1)

    def tokens(of: list[int]) -> Ragged:
        return Ragged(torch.randint(2, 8192, (sum(of),), generator=draw), tuple(of))

    prompts, responses = tokens(sizes["P"]), tokens(sizes["T"])
    old = Ragged(torch.full((len(responses.values),), -9.0), responses.lengths)
    return Batch(prompts, responses, torch.randn(SAMPLES, generator=draw), old, old)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--longest", type=int, default=2048, help="maximum response length in tokens")
    parser.add_argument("--budget", type=int, default=8192, help="tokens per dynamic microbatch or packed row")
    parser.add_argument("--float32", action="store_true", help="show that gradients differ by rounding only")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    import torch
    import torch.multiprocessing as multiprocessing

    from pipeline.declare.ranks import open_store

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in options.ranks:
            store = open_store("127.0.0.1", size, deadline_s=DEADLINE_S)
            multiprocessing.spawn(rank_main, (size, store.port, options, folder), nprocs=size)
            rows += torch.load(Path(folder) / f"{size}.pt")
    names = ["ranks", "way", "update_s", "tokens_per_s", "microbatches", "padding", "balance", "peak_gib", "gradient"]
    notes = (
        f"{SAMPLES} samples, responses of up to {options.longest} tokens, budget {options.budget} tokens, "
        + ("float32" if exact(options) else "bfloat16 with float32 masters")
        + (", tiny model." if options.cpu else ", activations recomputed.")
    )
    report("gpu.data_parallel", rows, names, notes, options.out)


if __name__ == "__main__":
    main()
