"""Time from the end of an update until the sampler generates with it: refits into a running vLLM, on GPUs of one host.

python -m benchmarks.gpu.refit_ready [--model 4B] [--senders 2] [--layout "stages=2"] [--tensor 2] [--shared]
                                     [--peer nccl ipc] [--cpu]

Senders hold the model as Megatron-core's ranks do, one process per GPU; the engine is the same as in a run, on other
GPUs or, with --shared, on the senders' GPUs, as if trainer and sampler were colocated and both awake. A round is
`publish` on all senders and then `serve`: pause, every rank receives its part and computes checksums, resume. The
versions' values differ. The table has medians and 95th percentiles of the parts in milliseconds, from the refit's
record.
`--peer` then does the same with vLLM's own engines, from one GPU that holds the whole model (`vllm_transfer`).

Aim (8 H200): Qwen3-4B TP2 PP2 -> TP4 ready to generate in 10 ms, Qwen3-30B-A3B EP4 -> TP4 in 60 ms.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu import vllm_transfer
from benchmarks.gpu.shapes import SHAPES, model_of
from benchmarks.report import report
from pipeline import Model, StageContext, WorkerGroup

WARM = 5
COLUMNS = ("arm", "part", "median_ms", "p95_ms")
PARTS = ("ready", "publish", "serve", "pause", "receive", "move", "check", "finish", "resume")


def sender(wire: Connection, gpu: str, folder: str, layout: str, senders: int, number: int) -> None:
    """A process that holds a Megatron rank's part, and publishes it on request."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    from benchmarks.gpu.refit import trained
    from ops.refit.share import Shares
    from stages.backends.megatron import places
    from stages.backends.megatron.names import parameters
    from stages.backends.model.families import decoder_of

    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    decoder = decoder_of(json.loads((Path(folder) / "config.json").read_text()), folder)
    part = trained({kind: int(size) for kind, size in (word.split("=") for word in layout.split())}, senders)[number]
    kind = str(dtype).removeprefix("torch.")
    held = {n: torch.zeros(p.shape, dtype=dtype, device=device) for n, p in parameters(decoder, part).items()}
    shares = Shares(places.tensors(decoder, kind), places.places(decoder, part, dtype.itemsize), held)
    while (version := wire.recv()) is not None:
        for parameter in held.values():
            parameter.fill_(0.01 * (version % 7))  # equal on all replicas
        if gpu:
            torch.cuda.synchronize()
        wire.send(None)
        wire.recv()
        begun_s = time.perf_counter()
        share = shares.publish(held)
        took_s = time.perf_counter() - begun_s
        wire.send((share, took_s))


def measured(options: argparse.Namespace, folder: Path, path: str, gpus: list[str]) -> list[dict[str, float]]:
    """Run all rounds. Returns the parts of each round in milliseconds."""
    from stages.backends.vllm.engine import open_engine

    context = multiprocessing.get_context("spawn")
    wires = []
    for number in range(options.senders):
        ours, theirs = context.Pipe()
        own = "" if options.cpu else gpus[number % options.tensor if options.shared else number]
        arguments = (theirs, own, path, options.layout, options.senders, number)
        context.Process(target=sender, args=arguments, daemon=True).start()
        wires.append(ours)
    first = 0 if options.shared else options.senders
    served = gpus[first : first + options.tensor]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(served)
    group = WorkerGroup(
        "sampler", backend="vllm", workers=options.tensor, gpus=len(served), tensor_parallel=options.tensor, threads=1,
        memory=options.memory,
    )  # fmt: skip
    backend = open_engine(StageContext(group=group, rank=0, seed=0, group_size=1, run_dir=folder, shared={}))
    model, rounds = Model(path), []
    backend.client(model)
    for version in range(WARM + options.timed):
        for wire in wires:
            wire.send(version)
        for wire in wires:
            wire.recv()
        begun_s = time.perf_counter()
        for wire in wires:
            wire.send("now")
        answers = [wire.recv() for wire in wires]
        published_s = time.perf_counter()
        record = backend.serve(model, [share for share, _ in answers], version).record
        ready_s = time.perf_counter()
        found = {
            "ready": 1e3 * (ready_s - begun_s), "publish": 1e3 * max(took_s for _, took_s in answers),
            "serve": 1e3 * (ready_s - published_s), "lookups": record["lookups"], "loader": record["through_loader"],
        }  # fmt: skip
        rounds.append(found | {part: record[f"{part}_ms"] for part in PARTS[3:]})
    print("by loader:", backend.client(model).loaded, flush=True)
    for wire in wires:
        wire.send(None)
    backend.close()
    return rounds


def rows_of(arm: str, parts: Sequence[str], rounds: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """One row per part."""
    return [
        {
            "arm": arm,
            "part": part,
            "median_ms": round(statistics.median(found[part] for found in rounds), 2),
            "p95_ms": round(statistics.quantiles([found[part] for found in rounds], n=20)[-1], 2),
        }
        for part in parts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="4B")
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--layout", default="stages=2", help="layout of the senders: tensor=, stages=, experts=")
    parser.add_argument("--tensor", type=int, default=2, help="number of GPUs of the engine")
    parser.add_argument("--shared", action="store_true", help="the engine runs on the senders' GPUs")
    parser.add_argument("--peer", choices=("nccl", "ipc"), nargs="*", default=[], help="vLLM's own engines")
    parser.add_argument("--memory", type=float, default=0.85, help="share of a GPU for the engine's weights and cache")
    parser.add_argument("--timed", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.cpu:
        options.model, options.tensor = "tiny", 1
    gpus = [] if options.cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    with tempfile.TemporaryDirectory() as folder:
        path = model_of(options.model, Path(folder))
        rounds = measured(options, Path(folder), path, gpus)[WARM:]
        lookups = max(found["lookups"] for found in rounds)
        warm = f"look-ups per round {lookups:g} (warm: 0), tensors through the loader {rounds[-1]['loader']:g}"
        where = " on the same GPUs" if options.shared else ""
        mapping = f"{options.senders} senders ({options.layout}) to TP{options.tensor}{where}"
        notes = f"{options.model}: {mapping}, {len(rounds)} rounds; {warm}."
        rows = rows_of("sluice", PARTS, rounds)
        report("gpu.refit_ready", rows, COLUMNS, notes, options.out)
        for engine in options.peer:
            own = vllm_transfer.measured(engine, options, path, gpus, WARM + options.timed)[WARM:]
            rows += rows_of(f"vLLM {engine}", vllm_transfer.PARTS, own)
            report("gpu.refit_ready", rows, COLUMNS, notes, options.out)


if __name__ == "__main__":
    main()
