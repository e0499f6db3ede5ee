"""A rank of a refit over gloo, for tests: python -m tests.refit_ranks RANK PORT FOLDER

Two senders and two receivers execute every pair of layouts of every family, with every transport, for two versions.
The memory of a receiver is compared with what vLLM's own loader would produce from the same folder. FOLDER/RANK.json
lists the differences by case and transport. With a fourth argument, the pairs that only the search has.
"""

import json
import sys
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ops.comm.stateless_group import StatelessGroup
from ops.refit.layout import Layout
from ops.refit.plan import build
from ops.refit.share import Shares, layout_of
from ops.refit.transports import TRANSPORTS as KNOWN
from ops.refit.transports.broadcast import Buckets
from ops.refit.transports.meeting import Meeting
from ops.refit.transports.packed import PackedExchange
from stages.backends.megatron import places as megatron
from stages.backends.model.precision import kept_dtype
from stages.backends.vllm import places as vllm
from tests.unit.refit_models import FAMILIES, ITEM, SERVING, TRAINING, fits, folder, served, trained, unit

SENDERS = 2
SIZE = 4
TRAINED = ("TP1", "TP2", "PP2", "DP2", "EP2", "TP2 ETP1", "TP2 ETP1 EP2")
SERVED = ("TP1", "TP2", "DP2")
ONCE = {  # trained in one layout; test_refit_places has all of them
    **dict.fromkeys(("glm4_moe", "deepseek_v3", "nemotron_h, experts"), "TP2 ETP1 EP2"),
    "nemotron_h": "TP2",
    "nemotron_h, 1 group": "PP2",
}
IN_SUITE = {"qwen2": "PP2", "qwen3": "DP2"}  # in other layouts only when searched: llama has all of them
CASES = [
    (family, training, serving)
    for family, training, serving in product(FAMILIES, TRAINED, SERVED)
    if fits(family, training) and (ONCE | IN_SUITE).get(family, training) == training
]
SEARCHED = [
    (family, training, serving)
    for family, training, serving in product(IN_SUITE, TRAINED, SERVED)
    if fits(family, training) and IN_SUITE[family] != training
]
TRANSPORTS = ("pull", "pull of bytes", "golden", "gloo", "broadcast")
CPU, POISON = torch.device("cpu"), 0xEE


class Rank:
    """One process, taking part in all cases."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank, self.port = rank, port
        self.receives, self.number = rank >= SENDERS, rank % SENDERS
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=120)
        )
        self._groups: dict[tuple[int, ...], StatelessGroup] = {}

    def group(self, *ranks: int) -> StatelessGroup | None:
        """Return the group of these ranks; None if this rank is not in it."""
        if self.rank not in ranks:
            return None
        if ranks not in self._groups:
            port = self.port + 1 + sum(1 << rank for rank in ranks)
            self._groups[ranks] = StatelessGroup.join(
                "127.0.0.1", port, rank=ranks.index(self.rank), ranks=len(ranks), device=CPU, deadline_s=120
            )
        return self._groups[ranks]

    def carry(self, family: str, training: str, serving: str) -> dict[str, list[str]]:
        """Return, by transport, which parameters of this rank differ after either version."""
        decoder, parts, (tensor, replicas) = FAMILIES[family], TRAINING[training], SERVING[serving]
        takers, tensors = range(SENDERS, SENDERS + tensor * replicas), megatron.tensors(decoder, "bfloat16")
        source = Layout(tensors, [megatron.places(decoder, part, ITEM) for part in parts])
        destination = Layout(
            tensors, [vllm.places(decoder, rank % tensor, tensor, ITEM) for rank in range(len(takers))]
        )
        everyone, trainers, takers_of_all = [*range(len(parts)), *takers], [*range(len(parts))], [0, *takers]
        active = self.rank in everyone
        if self.receives:
            held = {
                name: np.zeros(shape, unit(kept_dtype(name))) for name, shape in vllm.shapes(decoder, tensor).items()
            }
        else:
            held = trained(decoder, parts[self.number % len(parts)], folder(decoder))
        flat = {name: torch.from_numpy(array.view(np.uint8).reshape(-1)) for name, array in held.items()}
        typed = {
            name: memory.view(torch.float32 if held[name].itemsize == 4 else torch.bfloat16)
            for name, memory in flat.items()
        }
        if active and self.receives:
            receivers = {name: KNOWN[name].receiver() for name in ("pull", "golden")}
            meetings = {name: Meeting(CPU, self.number, receives=True) for name in TRANSPORTS}
        elif active:
            own = Shares(tensors, source.ranks[self.number], typed)
        if active:
            packed = PackedExchange.of_plan(
                build(source, destination, segment_bytes=256), self.group(*everyone), number=self.number,
                receives=self.receives, senders=len(parts), receivers=len(takers), buffers=flat, slot_bytes=2048,
            )  # fmt: skip
            broadcast = Buckets(
                source, destination, number=self.number, receives=self.receives, buffers=flat,
                senders=self.group(*trainers), receivers=self.group(*takers_of_all), bucket_bytes=4096,
            )  # fmt: skip
        found: dict[str, list[str]] = {}
        for transport in TRANSPORTS:
            found[transport] = []
            for memory in flat.values() if self.receives else ():
                memory.fill_(POISON)
            for model in versions(family):
                share = None
                if active and not self.receives:
                    for name, array in trained(decoder, parts[self.number], model).items():
                        held[name][...] = array
                    share = own.publish(typed, KNOWN["pull" if transport == "pull" else "messages"].sender().offer)
                shares: list[Any] = [None] * SIZE
                dist.all_gather_object(shares, share)
                if active and transport in ("gloo", "broadcast"):
                    (packed if transport == "gloo" else broadcast).run()
                elif active and self.receives:
                    taken = [share for share in shares if share is not None]
                    receiver, meeting = receivers["golden" if transport == "golden" else "pull"], meetings[transport]
                    move = lambda: receiver.receive(meeting, taken, 1)  # noqa: B023, E731
                    meeting.carry(1, layout_of(taken), destination, flat, move)
                dist.barrier()
                if active and self.receives:
                    found[transport] += differing(held, served(decoder, self.number % tensor, tensor, model))
        return found


def versions(family: str) -> list[dict[str, np.ndarray]]:
    """Return two models with the same tensors."""
    first = folder(FAMILIES[family])
    return [first, {name: array * 3 + 1 for name, array in first.items()}]


def differing(held: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[str]:
    """Return the names that differ; `wanted` has 0xEEEE in padding, as poisoned memory has."""
    return sorted(name for name in held.keys() | wanted.keys() if (held[name] != wanted[name]).any())


def main() -> None:
    rank = Rank(int(sys.argv[1]), int(sys.argv[2]))
    found = {" ".join(case): rank.carry(*case) for case in (SEARCHED if sys.argv[4:] else CASES)}
    (Path(sys.argv[3]) / f"{rank.rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
