"""Time from the end of an update until the sampler generates with it, of an adapter: `refit_ready` for LoRA, on one GPU
or two.

python -m benchmarks.gpu.lora_ready [--model 8B] [--rank 16] [--apart] [--busy 64] [--cpu]

A process holds the adapter as a trainer does; the vLLM engine is the same as in a run, on the same GPU or, with
--apart, on the next one. A round is `publish` and then `serve`: the engine receives the adapter, computes checksums and
puts it beside those that running samples use. `--busy` samples run meanwhile, which the adapter does not pause. The
values of the versions differ. The table has medians and 95th percentiles of the parts in milliseconds.

Aim: the adapter of an 8B model is ready in 5 ms.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.gpu.refit_ready import COLUMNS, WARM, rows_of
from benchmarks.gpu.shapes import SHAPES, model_of
from benchmarks.report import report
from pipeline import Model, StageContext, WorkerGroup
from stages import LoRA
from stages.backends import Draws, Sampling

PARTS = ("ready", "publish", "serve", "receive", "move", "check", "finish")


def trainer(wire: Connection, gpu: str, folder: str, rank: int) -> None:
    """A process that holds an adapter, and publishes it on request."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    from ops.refit.layout import dense, whole
    from ops.refit.share import Shares
    from stages.backends.vllm.weights import expected

    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    tensors = expected(Path(folder), dtype, LoRA(rank=rank))
    held = {name: torch.zeros(tensor.shape, dtype=dtype, device=device) for name, tensor in tensors.items()}
    places = [dense(name, whole(tensor.shape), tensor.item_bytes, name) for name, tensor in tensors.items()]
    shares = Shares(tensors, places, held)
    while (version := wire.recv()) is not None:
        for tensor in held.values():
            tensor.fill_(0.001 * (version % 7))
        if gpu:
            torch.cuda.synchronize()
        begun_s = time.perf_counter()
        share = shares.publish(held)
        wire.send((share, time.perf_counter() - begun_s))


def measured(options: argparse.Namespace, folder: Path, path: str, gpus: list[str]) -> list[dict[str, float]]:
    """Run all rounds. Returns the parts of each round in milliseconds."""
    from stages.backends.vllm.engine import open_engine

    context = multiprocessing.get_context("spawn")
    wire, theirs = context.Pipe()
    arguments = (theirs, "" if options.cpu else gpus[0], path, options.rank)
    context.Process(target=trainer, args=arguments, daemon=True).start()
    if not options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[1 if options.apart else 0]
    group = WorkerGroup("sampler", backend="vllm", gpus=0 if options.cpu else 1, threads=1, memory=options.memory)
    stage = StageContext(group=group, rank=0, seed=0, group_size=1, run_dir=folder, shared={}, max_staleness=1)
    backend, model = open_engine(stage), Model(path, lora=LoRA(rank=options.rank))
    client = backend.client(model)
    prompts = backend.encode(model, ["How long does an adapter take?"] * options.busy) if options.busy else None
    rounds, running = [], []
    for version in range(WARM + options.timed):
        if prompts is not None:
            draws = Draws(version, tuple(range(options.busy)), (0,) * options.busy)
            requests = backend._requests(model, prompts, Sampling(max_tokens=512), draws, None)
            client.start(client.sample(requests))
            client.start(client.end(running))
            running = requests
            time.sleep(0.2)  # until all of them have started
        wire.send(version)
        share, published_s = wire.recv()
        begun_s = time.perf_counter()
        record = backend.serve(model, [share], version).record
        served_s = time.perf_counter() - begun_s
        found = {"ready": published_s + served_s, "publish": published_s, "serve": served_s}
        rounds.append({part: 1e3 * each_s for part, each_s in found.items()})
        rounds[-1] |= {part: record[f"{part}_ms"] for part in PARTS[3:]}
        rounds[-1] |= {"size_bytes": float(share.model_bytes), "lookups": record["lookups"]}
    client.start(client.end(running))
    wire.send(None)
    backend.close()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="8B")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--apart", action="store_true", help="the engine has a GPU of its own")
    parser.add_argument("--busy", type=int, default=0, help="samples that run meanwhile")
    parser.add_argument("--memory", type=float, default=0.7, help="share of a GPU for the engine's weights and cache")
    parser.add_argument("--timed", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.cpu:
        options.model = "tiny"
    gpus = [] if options.cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with tempfile.TemporaryDirectory() as folder:
        path = model_of(options.model, Path(folder))
        rounds = measured(options, Path(folder), path, gpus)[WARM:]
        size, lookups = rounds[-1]["size_bytes"] / 2**20, max(found["lookups"] for found in rounds)
        notes = f"{options.model}, rank {options.rank}, {size:.1f} MiB, {options.busy} samples running; "
        notes += f"{len(rounds)} rounds; look-ups per round {lookups:g} (warm: 0 on GPUs)."
        report("gpu.lora_ready", rows_of("adapter", PARTS, rounds), COLUMNS, notes, options.out)


if __name__ == "__main__":
    main()
