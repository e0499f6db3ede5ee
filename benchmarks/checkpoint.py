"""How long training stands still for a checkpoint: written at once, copied, and with torch.distributed.checkpoint.

    python -m benchmarks.checkpoint [--layers 8] [--device cpu] [--rounds 3] [--out FILE]

A learner of the torch backend with a model of Qwen3-0.6B's width and its AdamW moments, after one update. `waits` is
until the weights may change, `complete` until files, manifest and names are synced. `update` is the median of updates
that run while the copy is written, over the median of updates while nothing is. The rival is torch's `async_save` of
the same tensors, which has no manifest with checksums.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import async_save

from benchmarks.gpu.torch_backend import QWEN3_06B
from benchmarks.report import report
from pipeline import Model
from pipeline.declare.columns import Ragged
from pipeline.executors import saving
from pipeline.executors.saving import Saving
from pipeline.record import checkpoint
from pipeline.rundir import RunDir
from stages import ClippedLoss
from stages.backends import Batch, Optimization, one_shard
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.torch.optimize import TorchLearner

COLUMNS = ["way", "GB", "waits s", "complete s", "update ratio", "waits ratio"]
WAYS = AT_ONCE, COPIED, RIVAL = "written at once", "copied", "torch async_save"
SAMPLES, TOKENS = 4, 64  # of an update: samples, and tokens of each


def learner(layers: int, device: str) -> TorchLearner:
    """Return a learner of random weights."""
    model = Model("model", config=QWEN3_06B | {"num_hidden_layers": layers, "vocab_size": 32000}, alphabet="0123456789")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    network = load_network(model, load_tokenizer(model), dtype=dtype, device=torch.device(device))
    return TorchLearner(network, Optimization(lr=1e-4), pad=0)


def updates(trained: TorchLearner) -> Callable[[], float]:
    """Return a function that runs one update and returns its seconds."""
    lengths = (TOKENS,) * SAMPLES

    def column(values: torch.Tensor) -> Ragged:
        return Ragged(values, lengths)

    tokens = SAMPLES * TOKENS
    batch = Batch(
        prompt_ids=column(torch.randint(0, 10, (tokens,))),
        response_ids=column(torch.randint(0, 10, (tokens,))),
        advantage=torch.randn(SAMPLES),
        old_logprobs=column(-torch.rand(tokens)),
    )
    (todo,) = one_shard(batch.prompt_ids, batch.response_ids).updates

    def run() -> float:
        start_s = time.perf_counter()
        trained.update(batch, ClippedLoss(), temperature=1.0, update=todo)
        if trained.network.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    return run


def ours(trained: TorchLearner, run: RunDir, update: Callable[[], float]) -> tuple[float, float, list[float]]:
    """Return the seconds that training waits, those until the checkpoint is complete, and updates meanwhile."""
    start_s = time.perf_counter()
    writes, draft = Saving(lambda stage, error: error), checkpoint.Draft(run, 1)  # type: ignore[arg-type, return-value]
    writes.hold({"train": trained}, draft.folder, 1)
    waits_s = time.perf_counter() - start_s
    times_s = []
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(writes.finish)
        while not done.done():
            times_s.append(update())
        done.result()
    draft.finish(graph="benchmark", next_group=0, seed=0)
    draft.put()
    return waits_s, time.perf_counter() - start_s, times_s


def rival(trained: TorchLearner, folder: Path, update: Callable[[], float]) -> tuple[float, float, list[float]]:
    """The same for torch's asynchronous checkpoint."""
    tensors = {name: dict(file) for name, file in trained._files()}
    start_s = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done: Any = async_save(tensors, checkpoint_id=folder)
    waits_s = time.perf_counter() - start_s
    times_s = []
    while not done.done():
        times_s.append(update())
    done.result()
    return waits_s, time.perf_counter() - start_s, times_s


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the learner")
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints of each way; each goes first in turn")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    trained = learner(options.layers, options.device)
    update = updates(trained)
    update()
    quiet_s = statistics.median(update() for _ in range(5))
    free_bytes, found = saving.free_bytes, {way: [] for way in WAYS}  # type: dict[str, list[Any]]
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        for number in range(options.rounds):
            for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):  # the first finds the host's memory cold
                times, folder = found[way], Path(place, f"{number}")
                saving.free_bytes = (lambda: 0) if way == AT_ONCE else free_bytes
                if way == RIVAL:
                    times.append(rival(trained, folder, update))
                else:
                    times.append(ours(trained, RunDir(folder).create(), update))
                shutil.rmtree(folder)
        dist.destroy_process_group()
    rows = []
    base_s = statistics.median(waits_s for waits_s, _, _ in found[AT_ONCE])
    for way, times in found.items():
        waits_s = statistics.median(each[0] for each in times)
        beside_s = [second for each in times for second in each[2]]
        rows.append(
            {
                "way": way,
                "GB": trained.saved_bytes() / 1e9,
                "waits s": waits_s,
                "complete s": statistics.median(each[1] for each in times),
                "update ratio": statistics.median(beside_s) / quiet_s if beside_s else None,
                "waits ratio": waits_s / base_s,
            }
        )
    notes = f"Medians of {options.rounds} rounds in turn; {options.layers} layers on {options.device}."
    report("checkpoint", rows, COLUMNS, notes, options.out)


if __name__ == "__main__":
    main()
