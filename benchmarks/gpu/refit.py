"""How fast each transport turns a training layout into a serving layout, on the GPUs of one host.

python -m benchmarks.gpu.refit [--models 4B 8B 30B-A3B] [--timed 20] [--trace FOLDER] [--out FILE] [--cpu]

Half of the GPUs hold a model as Megatron-core's ranks do, the other half receive it as vLLM's ranks do, each in a
process that sees only its own GPU, as under Ray. Each value encodes its tensor and its position. Transports take turns,
one round each, after 5 rounds that are not counted; a round's time is that of the slowest rank, from a barrier to the
end of its work on the GPU. The table has the median, the 95th percentile, and bytes per second of a receiver; `publish`
is the trainer's work before a pull: it copies its part into memory that others can open and computes checksums. Every
destination is overwritten before a transport's warm-up rounds, and its checksum compared with the senders' after them.
`--trace` records one more round of `p2p` and `broadcast` on each rank's streams, and reports how much of packing and
unpacking another message hides (`hidden_percent`, per rank).

Aims (8 H200): pull at 345 GB/s per receiver or more, 365 for long runs; 4B TP2 PP2 -> TP4 in 5.8 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.overlap import hidden_percent, traced
from benchmarks.refit_plan import QWEN3_4B, QWEN3_30B, qwen3, split
from benchmarks.report import report
from ops.comm.stateless_group import StatelessGroup
from ops.refit.layout import Layout, Place, Tensor
from ops.refit.move import flat as bytes_of
from ops.refit.plan import build
from ops.refit.share import Shares, digest_of, layout_of
from ops.refit.sums import Sums, digest
from ops.refit.transports.broadcast import Buckets
from ops.refit.transports.meeting import Meeting
from ops.refit.transports.packed import PackedExchange
from ops.refit.transports.pull import PullReceiver
from stages.backends.megatron.names import parameters
from stages.backends.megatron.parts import Part
from stages.backends.model.decoder import Decoder, Dense, Grouped, Layer, Sparse
from stages.backends.vllm import places as vllm

MODELS = {
    "4B": QWEN3_4B,
    "8B": Decoder(
        layers=32 * (Layer(mixer=Grouped(heads=32, groups=8, head_dim=128), mlp=Dense(inner=14336)),),
        hidden=4096, vocab=128256, tied=False,
    ),
    "30B-A3B": QWEN3_30B,
    "tiny": Decoder(
        layers=4 * (Layer(mixer=Grouped(heads=8, groups=4, head_dim=16, norm=True), mlp=Dense(inner=128)),),
        hidden=64, vocab=300, tied=True,
    ),
    "tiny-moe": Decoder(
        layers=2 * (Layer(mixer=Grouped(heads=8, groups=4, head_dim=16, norm=True),
                          mlp=Sparse(experts=8, chosen=2, inner=32)),),
        hidden=64, vocab=300, tied=False,
    ),
}  # fmt: skip
NAMES = {"4B": "Qwen3-4B", "8B": "Llama-8B", "30B-A3B": "Qwen3-30B-A3B"}
MAPPINGS: dict[
    int, dict[str, tuple[tuple[str, ...], dict[str, int], int]]
] = {  # by the number of senders, which equals that of receivers
    4: {
        "TP2 PP2 -> TP4": (("4B", "8B", "tiny"), {"tensor": 2, "stages": 2}, 4),
        "TP4 -> TP4": (("4B", "8B", "tiny"), {"tensor": 4}, 4),
        "DP4 -> DP4": (("4B", "8B", "tiny"), {}, 1),
        "PP4 -> TP2 DP2": (("4B", "8B", "tiny"), {"stages": 4}, 2),
        "EP4 -> TP4": (("30B-A3B", "tiny-moe"), {"experts": 4}, 4),
    },
    2: {
        "PP2 -> TP2": (("4B", "8B", "tiny"), {"stages": 2}, 2),
        "TP2 -> TP2": (("4B", "8B", "tiny"), {"tensor": 2}, 2),
        "DP2 -> DP2": (("4B", "8B", "tiny"), {}, 1),
        "EP2 -> TP2": (("30B-A3B", "tiny-moe"), {"experts": 2}, 2),
    },
    1: {"TP1 -> TP1": (("4B", "8B", "tiny", "tiny-moe"), {}, 1)},
}
ARMS = ("pull", "p2p", "broadcast", "golden")
WARM = 5
DEADLINE_S = 560.0


def trained(layout: dict[str, int], senders: int) -> list[Part]:
    """The parts of the senders; ranks beyond those of the layout are data-parallel replicas."""
    return split(**layout, replicas=senders // prod(layout.values()))


def encoded(place: Place, tensor: Tensor, version: int, device: torch.device) -> torch.Tensor:
    """Values of a box, 16 bits each, that encode their tensor and element."""
    index = torch.zeros([1] * len(place.box), dtype=torch.int64, device=device)
    for dimension, (start, stop) in enumerate(place.box):
        steps = int(np.prod(tensor.shape[dimension + 1 :]))
        shape = [1] * len(place.box)
        shape[dimension] = stop - start
        index = index + steps * torch.arange(start, stop, device=device).view(shape)
    salt = zlib.crc32(place.tensor.encode()) + 104729 * version
    return ((index * 40503 + (index >> 16) * 30011 + salt) & 0x7FFF).to(torch.int16)


class Rank:
    """One process: a sender or a receiver."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.number, self.ranks = options.rank, options.ranks
        self.senders = self.ranks // 2
        self.receives = self.number >= self.senders
        self.own = self.number - self.senders if self.receives else self.number
        self.device = torch.device("cpu" if options.cpu else "cuda")
        if not options.cpu:
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(0)
        self.port, self.timed, self.traces = options.port, options.timed, options.trace
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{self.port}", rank=self.number, world_size=self.ranks,
            timeout=timedelta(seconds=300),
        )  # fmt: skip
        self.all = self._join(1, range(self.ranks), "all")
        self.trainers = self._join(2, range(self.senders), "trainers")
        self.takers = self._join(3, [0, *range(self.senders, self.ranks)], "takers")

    def _join(self, port: int, ranks: Any, name: str) -> StatelessGroup | None:
        ranks = list(ranks)
        if self.number not in ranks:
            return None
        rank = ranks.index(self.number)
        return StatelessGroup.join(
            "127.0.0.1", self.port + port, rank=rank, ranks=len(ranks), device=self.device, name=name
        )

    def mapping(self, model: str, name: str, layout: dict[str, int], tensor: int) -> list[dict[str, Any]]:
        """Measure all arms of one mapping. Returns the rows."""
        decoder = MODELS[model]
        parts = trained(layout, self.senders)
        source, destination = qwen3(decoder, parts, tensor, self.senders // tensor)
        tensors = source.tensors
        if self.receives:
            shapes = vllm.shapes(decoder, tensor)
            held = {n: torch.empty(shape, dtype=torch.bfloat16, device=self.device) for n, shape in shapes.items()}
        else:
            table = parameters(decoder, parts[self.own])
            held = {n: torch.zeros(p.shape, dtype=torch.bfloat16, device=self.device) for n, p in table.items()}
            for place in source.ranks[self.own]:
                memory = held[place.buffer].view(-1).view(torch.int16)
                sizes = [stop - start for start, stop in place.box]
                strides = [stride // 2 for stride in place.strides]
                torch.as_strided(memory, sizes, strides, place.offset // 2).copy_(
                    encoded(place, tensors[place.tensor], 1, self.device)
                )
        flat = {n: bytes_of(t) for n, t in held.items()}
        arms, publish = self._arms(source, destination, held, flat)
        rows = self._timed(model, name, arms, publish, tensors, destination, flat, tensor)
        if self.traces:
            for row in rows:
                if row["arm"] in ("p2p", "broadcast"):
                    row["hidden_percent"] = self._hidden(arms[row["arm"]], f"{model} {name} {row['arm']}")
        return rows

    def _hidden(self, run: Callable[[], Any], name: str) -> list[int]:
        """The hidden percentage of each rank, in one more round."""
        path = Path(self.traces) / f"{name} {self.number}.json".replace(" -> ", "-").replace(" ", "-")
        dist.barrier()
        traced(run, path)
        hidden: list[Any] = [None] * self.ranks
        dist.all_gather_object(hidden, round(hidden_percent(path)))
        return hidden

    def _arms(
        self, source: Layout, destination: Layout, held: dict[str, torch.Tensor], flat: dict[str, torch.Tensor]
    ) -> tuple[dict[str, Callable[[], Any]], Callable[[], Any] | None]:
        plan = build(source, destination)
        made: dict[str, Callable[[], Any]] = {}
        publish = None
        if self.receives:
            shares = self._gathered(None)
            pull, meeting = PullReceiver(), Meeting(self.device, self.own, receives=True)
            layout = layout_of(shares)
            move = lambda: pull.receive(meeting, shares, 1)  # noqa: E731
            made["pull"] = lambda: meeting.carry(1, layout, destination, flat, move)
        else:
            own = Shares(source.tensors, source.ranks[self.own], held)
            self._gathered(own.publish(held))
            publish = lambda: own.publish(held)  # noqa: E731
            made["pull"] = lambda: None
        self.offered = digest_of(self.shares)
        packed = PackedExchange.of_plan(
            plan, self.all, number=self.own, receives=self.receives, senders=self.senders,
            receivers=self.ranks - self.senders, buffers=flat,
        )  # fmt: skip
        made["p2p"] = packed.run
        for name, sizes in (("broadcast", {}), ("golden", {"bucket_bytes": 1, "buckets": 1})):
            made[name] = Buckets(
                source, destination, number=self.own, receives=self.receives, buffers=flat, senders=self.trainers,
                receivers=self.takers, **sizes,
            ).run  # fmt: skip
        return made, publish

    def _gathered(self, share: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, share)
        self.shares = [each for each in found if each is not None]
        return self.shares

    def _timed(
        self, model: str, name: str, arms: dict[str, Callable[[], Any]], publish: Any, tensors: Any,
        destination: Layout, flat: dict[str, torch.Tensor], tensor: int,
    ) -> list[dict[str, Any]]:  # fmt: skip
        taken: dict[str, list[float]] = {arm: [] for arm in [*arms, "publish", "sums"]}
        equal = {}
        sums = Sums(tensors, destination.ranks[self.own], flat.__getitem__) if self.receives else None
        for arm, run in arms.items():
            if self.receives:
                for memory in flat.values():
                    memory.fill_(0xEE)
            for _ in range(WARM):
                self._once(run)
            found: list[Any] = [None] * self.ranks
            dist.all_gather_object(found, sums.now() if sums else None)
            held = [each for each in found if each is not None]
            replicas = [held[i : i + tensor] for i in range(0, len(held), tensor)]
            equal[arm] = all(digest(tensors, replica) == self.offered for replica in replicas)
        for _ in range(self.timed):
            for arm, run in arms.items():
                taken[arm].append(self._once(run))
            taken["publish"].append(self._once(publish or (lambda: None)))
            taken["sums"].append(self._once(sums.now if sums else (lambda: None)))
        got = torch.tensor([sum(m.numel() for m in flat.values()) if self.receives else 0], dtype=torch.float64)
        dist.all_reduce(got, dist.ReduceOp.MAX)
        return [
            {
                "arm": arm, "model": NAMES.get(model, model), "mapping": name,
                "wire_ms": round(float(np.median(times)) * 1e3, 2),
                "p95_ms": round(float(np.percentile(times, 95)) * 1e3, 2),
                "gb_per_s_receiver": round(got.item() / float(np.median(times)) / 1e9, 1),
                "gb_receiver": round(got.item() / 1e9, 2), "bytes_equal": equal.get(arm, ""),
            }
            for arm, times in taken.items()
        ]  # fmt: skip

    def _once(self, run: Callable[[], Any]) -> float:
        """Run one round. Returns the seconds of the slowest rank."""
        self._done()
        dist.barrier()
        begun = time.perf_counter()
        run()
        self._done()
        took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    def _done(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def rank(options: argparse.Namespace) -> None:
    """Run one process of the benchmark."""
    own, rows = Rank(options), []
    for name, (models, layout, tensor) in MAPPINGS[own.senders].items():
        for model in models:
            if model in options.models:
                rows += own.mapping(model, name, layout, tensor)
                if own.number == 0:
                    print(f"{model} {name}: " + ", ".join(f"{r['arm']} {r['wire_ms']}" for r in rows[-6:]), flush=True)
                    Path(options.rows).write_text(json.dumps(rows))
                if own.device.type == "cuda":
                    torch.cuda.empty_cache()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["4B", "8B", "30B-A3B"])
    parser.add_argument("--timed", type=int, default=20, help="measured rounds")
    parser.add_argument("--trace", default="", help="folder for traces of each rank's streams")
    parser.add_argument("--ranks", type=int, default=0, help="number of processes; default: one per GPU")
    parser.add_argument("--cpu", action="store_true", help="tiny models over gloo, to try the script")
    parser.add_argument("--out", help="write JSON here")
    for hidden in ("--rank", "--port"):
        parser.add_argument(hidden, type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        rank(options)
        return
    if options.cpu:
        options.models, options.timed, options.ranks = ["tiny", "tiny-moe"], 3, options.ranks or 4
    ranks = options.ranks or torch.cuda.device_count()
    if options.trace:
        Path(options.trace).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [
            sys.executable, "-m", "benchmarks.gpu.refit", "--models", *options.models, "--timed", str(options.timed),
            "--ranks", str(ranks), "--port", "29710", "--rows", str(rows), "--trace", options.trace,
            *(["--cpu"] if options.cpu else []),
        ]  # fmt: skip
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))).split(",")
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(i)],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": visible[i] if i < len(visible) else ""},
            )
            for i in range(ranks)
        ]
        until_s = time.monotonic() + DEADLINE_S
        codes = [process.wait(max(1.0, until_s - time.monotonic())) for process in processes]
        notes = f"{ranks // 2} GPUs to {ranks // 2}, {options.timed} rounds; exit codes {codes}."
        columns = ["arm", "model", "mapping", "wire_ms", "p95_ms", "gb_per_s_receiver", "gb_receiver", "bytes_equal"]
        report("gpu.refit", json.loads(rows.read_text()), columns, notes, options.out)


if __name__ == "__main__":
    main()
