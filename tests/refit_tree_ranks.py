"""Ranks of refits in waves over gloo, for tests: python -m tests.refit_tree_ranks FOLDER

Two senders and four receivers are forked from one process that serves the store. They execute every pair of layouts of
every family, then refits with more replicas, then refits in which ranks die. Each rank writes its results to
FOLDER/RANK.json.
"""

import json
import multiprocessing
import os
import signal
import sys
from dataclasses import asdict
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ops.comm.stateless_group import StatelessGroup
from ops.refit.layout import Layout
from ops.refit.transports.tree import Fanout
from stages.backends.megatron import places as megatron
from stages.backends.model.decoder import Decoder
from stages.backends.vllm import places as vllm
from tests.refit_ranks import CASES, differing
from tests.unit.refit_models import FAMILIES, ITEM, SERVING, TRAINING, folder, served, trained

SENDERS, RECEIVERS = 2, 4
SIZE = SENDERS + RECEIVERS
TREE_CASES = [case for case in CASES if case[0] in ("llama", "qwen3_moe")]  # waves divide transfers, not tensors
REPLICAS = [
    (family, training, serving)
    for (family, training), serving in product(
        [("llama", "TP1"), ("qwen3", "PP2"), ("qwen3_moe", "EP2")], [(1, RECEIVERS), (2, RECEIVERS // 2)]
    )
]
DEADLINE_S = 60.0


class Member:
    """A process with its memory for a model: sender or receiver `number` of those that take part."""

    def __init__(
        self, decoder: Decoder, training: str, tensor: int, senders: list[int], receivers: list[int], rank: int
    ):
        self.decoder, self.tensor, self.receives = decoder, tensor, rank in receivers
        self.number = (receivers if self.receives else senders).index(rank)
        self.part = TRAINING[training][0 if self.receives else self.number]
        tensors = megatron.tensors(decoder, "bfloat16")
        self.source = Layout(tensors, [megatron.places(decoder, part, ITEM) for part in TRAINING[training]])
        self.destination = Layout(
            tensors, [vllm.places(decoder, number % tensor, tensor, ITEM) for number in range(len(receivers))]
        )
        if self.receives:
            self.held = {name: np.zeros(shape, np.uint16) for name, shape in vllm.shapes(decoder, tensor).items()}
        else:
            self.held = trained(decoder, self.part, folder(decoder))
        self.flat = {name: torch.from_numpy(array.view(np.uint8).reshape(-1)) for name, array in self.held.items()}

    def fanout(self, store: dist.TCPStore, name: str, **options: Any) -> Fanout:
        return Fanout(
            self.source, self.destination, store, number=self.number, receives=self.receives, buffers=self.flat,
            name=name, slot_bytes=8192, **{"deadline_s": DEADLINE_S, **options},
        )  # fmt: skip

    def begin(self, version: int) -> None:
        """On a sender, train a version; on a receiver, poison the served memory."""
        if self.receives:
            for memory in self.flat.values():
                memory.fill_(0xEE)
        else:
            for name, array in trained(self.decoder, self.part, model(self.decoder, version)).items():
                self.held[name][...] = array

    def wrong(self, version: int) -> list[str]:
        """Return the parameters that differ from what vLLM's loader would produce for the version."""
        if not self.receives:
            return []
        wanted = served(self.decoder, self.number % self.tensor, self.tensor, model(self.decoder, version))
        return differing(self.held, wanted)


def model(decoder: Decoder, version: int) -> dict[str, np.ndarray]:
    return {name: array * np.uint16(2 * version + 1) + np.uint16(version) for name, array in folder(decoder).items()}


class Rank:
    """One process, taking part in all cases."""

    def __init__(self, rank: int, port: int, path: Path) -> None:
        torch.set_num_threads(1)
        self.rank, self.path, self.version = rank, path, 0
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
        self.store.set(f"pid {rank}", str(os.getpid()))
        self.found: dict[str, Any] = {}

    def carried(
        self, name: str, case: tuple[str, str, int], senders: list[int], receivers: list[int], versions: int,
        **options: Any,
    ) -> None:  # fmt: skip
        """Record the outcome of each version: its record and the wrong parameters, or the error."""
        if self.rank not in senders + receivers:
            return
        family, training, tensor = case
        member = Member(FAMILIES[family], training, tensor, senders, receivers, self.rank)
        fanout = member.fanout(self.store, name, **options)
        self.found[name] = []
        (self.path / f"{self.rank}.json").write_text(json.dumps(self.found))  # the rank may be killed
        for version in range(1, versions + 1):
            member.begin(version)
            self.version = version
            try:
                record = asdict(fanout.run(version))
            except (ValueError, RuntimeError) as error:
                self.found[name].append({"error": type(error).__name__, "text": str(error), "held": fanout.held})
                return
            self.found[name].append({**record, "wrong": member.wrong(version)})
        fanout.close()

    def dies(self, rank: int, how: signal.Signals, *, version: int = 1, group: int = 0) -> None:
        """Send a signal to a rank when it sends its second message of a version through its `group`-th group."""
        send, seen = StatelessGroup.send, []

        def signalled(one: StatelessGroup, tensor: torch.Tensor, peer: int) -> None:
            if self.version == version:
                seen.append(one)
            if len(set(map(id, seen))) == group + 1 and seen.count(one) == 2:
                StatelessGroup.send = send  # type: ignore[method-assign]
                os.kill(os.getpid(), how)
            send(one, tensor, peer)

        StatelessGroup.send = signalled if rank == self.rank else send  # type: ignore[method-assign]

    def everything(self) -> None:
        for family, training, serving in TREE_CASES:
            tensor, replicas = SERVING[serving]
            senders = list(range(len(TRAINING[training])))
            receivers = list(range(SENDERS, SENDERS + tensor * replicas))
            self.carried(f"{family} {training} {serving}", (family, training, tensor), senders, receivers, 2)
        for family, training, (tensor, replicas) in REPLICAS:
            senders, receivers = list(range(len(TRAINING[training]))), list(range(SENDERS, SIZE))
            name = f"{family} {training} {replicas} of {tensor}"
            self.carried(name, (family, training, tensor), senders, receivers, 3, interfaces=("no such", "lo"))
        self.with_deaths()

    def with_deaths(self) -> None:
        self.dies(2, signal.SIGKILL)  # a receiver that sends to another
        self.carried("killed", ("qwen3", "PP2", 1), [0, 1], [2, 3, 4, 5], 3)
        self.dies(3, signal.SIGSTOP)
        self.carried("silent", ("qwen3", "PP2", 1), [0, 1], [3, 4, 5], 2, deadline_s=5.0)
        if self.rank == 0:
            os.kill(int(self.store.get("pid 3")), signal.SIGCONT)
        self.dies(1, signal.SIGKILL, version=2)  # half of the trainer, before any other rank has the version
        self.carried("no source", ("qwen3", "TP2", 1), [0, 1], [4, 5], 2)
        self.dies(0, signal.SIGKILL, group=1)  # the trainer, after a receiver has the version
        self.carried("no trainer", ("llama", "TP1", 1), [0], [4, 5], 1)


def run(rank: int, ports: Any, path: str) -> None:
    one = Rank(rank, ports.get(), Path(path))
    one.everything()
    (one.path / f"{rank}.json").write_text(json.dumps(one.found))


def main() -> None:
    forked = multiprocessing.get_context("fork")
    ports = forked.SimpleQueue()
    ranks = [forked.Process(target=run, args=(rank, ports, sys.argv[1])) for rank in range(SIZE)]
    for rank in ranks:
        rank.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in ranks:
        ports.put(store.port)
    for rank in ranks:
        rank.join()
    (Path(sys.argv[1]) / "codes.json").write_text(json.dumps([rank.exitcode for rank in ranks]))


if __name__ == "__main__":
    main()
