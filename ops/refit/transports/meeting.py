"""Transports that both sides carry out together: who meets, what they compare, and what they run then.

    spot = Spot("10.0.0.1", 29500, "refit learner.0 > sampler.0", deadline_s=300.0)
    ends = Ends(torch.device("cpu"))                            # in each process, once
    ends.carry("gloo", spot, source, destination, ...)          # in all of them, for every version

What was planned, connected and allocated stays as long as the same processes meet. Knows ranks and memory; it does not
know who serves the store, nor what becomes of a rank that does not get through.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import msgspec
import torch
import torch.distributed as dist

from ops.comm.stateless_group import GroupError, StatelessGroup
from ops.comm.store import Asking
from ops.refit.layout import Layout
from ops.refit.plan import build
from ops.refit.transports.broadcast import Broadcast
from ops.refit.transports.packed import Packed
from ops.refit.transports.tree import Tree
from ops.refit.waves import NoSourceError

TOGETHER = ("gloo", "p2p", "broadcast", "tree")

Record = dict[str, float]
Way = Callable[[int], Record]  # moves this rank's part of a version


@dataclass(frozen=True)
class Spot:
    """Where processes meet: a store that somebody serves who outlives them, and a name that no other processes have,
    nor these together with others. Once the store has something under that name, nobody waits here any more. No wait
    takes longer than `deadline_s`."""

    host: str
    port: int
    name: str
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank brings: it is the `number`-th of the senders or of the receivers. `buffers` are its own, flat
    bytes; `marks` say from which memory the senders send, and are the same on all ranks."""

    number: int
    receives: bool
    buffers: Mapping[str, torch.Tensor]
    marks: tuple[str, ...]


class Ends:
    """The meetings of one process, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spot: Spot | None = None
        self._client: dist.TCPStore | None = None
        self._forget()

    def carry(
        self, transport: str, spot: Spot, source: Layout, destination: Layout | None, part: Part, version: int
    ) -> Record:
        """Move this rank's part of a version. Senders do not know the destination: they are told it by the receivers.

        Returns `received_bytes` of a receiver; `lookups`, which counts meetings, plans, connections and messages that
        were not there from the version before; and `meet_ms` until all ranks were there, `plan_ms` until they knew what
        to do (0 once it is warm) and `move_ms`. Raises GroupError where a rank did not come or get through; ValueError
        where ranks do not plan from the same.
        """
        with ExitStack() as on_error:
            on_error.callback(self.close)  # so that nobody waits for a rank that does not go on
            try:
                record = self._carry(transport, spot, source, destination, part, version)
            except NoSourceError as error:
                raise GroupError(str(error)) from error
            except RuntimeError as error:
                raise error if isinstance(error, GroupError) else GroupError(f"{spot.name}: {error}") from error
            on_error.pop_all()
        return record

    def close(self) -> None:
        """Leave, without the others."""
        for group in self._groups.values():
            group.abandon()
        for tree in self._trees:
            tree.abandon()
        self._spot = None
        self._forget()

    def _forget(self) -> None:
        self._groups: dict[tuple[int, ...], StatelessGroup] = {}
        self._trees: list[Tree] = []
        self._ways: dict[tuple[str, ...], Way] = {}  # by the memory that the senders send from
        self._source: Layout | None = None
        self._turn, self._lookups = 0, 0

    def _carry(
        self, transport: str, spot: Spot, source: Layout, destination: Layout | None, part: Part, version: int
    ) -> Record:
        begun_s = time.perf_counter()
        if spot != self._spot:
            self.close()
            self._enter(spot)
        if source is not self._source and source != self._source:
            self._ways, self._source = {}, source
            self._destination = self._agreed(spot, destination, part)
            told = msgspec.msgpack.encode((transport, source, self._destination))
            self._digest = hashlib.sha256(told).hexdigest()
            self._lookups += 1
        self._meet(spot, part, f"{self._digest} {version}")
        met_s = planned_s = time.perf_counter()
        if part.marks not in self._ways:
            self._ways[part.marks] = self._planned(transport, spot, part)
            self._lookups += 1
            planned_s = time.perf_counter()
        record = self._ways[part.marks](version)
        record["lookups"] = record.get("lookups", 0.0) + self._lookups
        self._lookups = 0
        moved_s = time.perf_counter()
        times = {"meet_ms": met_s - begun_s, "plan_ms": planned_s - met_s, "move_ms": moved_s - planned_s}
        return record | {name: 1e3 * took_s for name, took_s in times.items()}

    def _enter(self, spot: Spot) -> None:
        """Reach the store."""
        if self._client is None or (self._client.host, self._client.port) != (spot.host, spot.port):
            self._client = dist.TCPStore(
                spot.host, spot.port, is_master=False, timeout=timedelta(seconds=spot.deadline_s),
                wait_for_workers=False, use_libuv=False,
            )  # fmt: skip
        self._asking = Asking(self._client, spot.deadline_s, over=spot.name)
        self._own = dist.PrefixStore(f"meeting {spot.name}", self._client)
        self._spot = spot
        self._lookups += 1

    def _agreed(self, spot: Spot, destination: Layout | None, part: Part) -> Layout:
        """The destination, which the first receiver tells."""
        if destination is None:
            self._asking.wait([f"meeting {spot.name}/destination"])
            return msgspec.json.decode(self._own.get("destination"), type=Layout)
        if part.number == 0:
            self._own.set("destination", msgspec.json.encode(destination).decode())
        return destination

    def _meet(self, spot: Spot, part: Part, plan: str) -> None:
        """Wait until all ranks are there. Raises ValueError where one plans from something else."""
        rank, ranks = self._rank(part), self._senders + len(self._destination.ranks)
        self._own.set(f"{self._turn} {rank}", plan)
        keys = [f"{self._turn} {each}" for each in range(ranks)]
        self._asking.wait([f"meeting {spot.name}/{key}" for key in keys])
        said = [bytes(value).decode() for value in self._own.multi_get(keys)]
        if self._turn:
            self._own.delete_key(f"{self._turn - 1} {rank}")  # all are past it
        self._turn += 1
        if others := [each for each, other in enumerate(said) if other != plan]:
            raise ValueError(
                f"refit, rank {rank}: ranks {others} plan from other layouts, or another version; every rank has to "
                "know the same. Fix: the same model on all ranks"
            )

    @property
    def _senders(self) -> int:
        assert self._source is not None
        return len(self._source.ranks)

    def _rank(self, part: Part) -> int:
        return self._senders + part.number if part.receives else part.number

    def _planned(self, transport: str, spot: Spot, part: Part) -> Way:
        source, destination, senders = self._source, self._destination, self._senders
        assert source is not None and self._client is not None
        receivers = len(destination.ranks)
        if transport == "tree":
            return self._in_waves(spot, part)
        if transport == "broadcast":
            takers = (0, *range(senders, senders + receivers))
            inner = self._group(spot, part, tuple(range(senders))) if senders > 1 and not part.receives else None
            outer = self._group(spot, part, takers) if self._rank(part) in takers else None
            broadcast = Broadcast(
                source, destination, number=part.number, receives=part.receives, buffers=part.buffers,
                senders=inner, receivers=outer,
            )  # fmt: skip
            size = sum(tensor.item_bytes * prod(tensor.shape) for tensor in destination.tensors.values())
            group = outer or inner
            assert group is not None
            return self._then_done(spot, broadcast.run, group, size if part.receives else 0)
        group = self._group(spot, part, tuple(range(senders + receivers)))
        plan = build(source, destination)
        packed = Packed(
            plan, group, number=part.number, receives=part.receives, senders=senders, receivers=receivers,
            buffers=part.buffers,
        )  # fmt: skip
        size = sum(copy.size for copy in plan.copies(part.number)) if part.receives else 0
        return self._then_done(spot, packed.run, group, size)

    def _then_done(self, spot: Spot, run: Callable[[], None], group: StatelessGroup, size: int) -> Way:
        def moved(version: int) -> Record:
            run()
            group.finish(spot.deadline_s, over=lambda: self._is_over(spot))
            return {"received_bytes": float(size)}

        return moved

    def _in_waves(self, spot: Spot, part: Part) -> Way:
        assert self._source is not None and self._client is not None
        tree = Tree(
            self._source, self._destination, self._client, number=part.number, receives=part.receives,
            buffers=part.buffers, name=f"{spot.name} {' '.join(part.marks)}", deadline_s=spot.deadline_s,
        )  # fmt: skip
        self._trees.append(tree)

        def moved(version: int) -> Record:
            tree.held = None  # another tree may have written there since
            record = tree.run(version)
            names = ("received_bytes", "sent_bytes", "lookups", "waves", "replans")
            return {name: float(getattr(record, name)) for name in names}

        return moved

    def _is_over(self, spot: Spot) -> bool:
        assert self._client is not None
        return bool(self._client.check([spot.name]))

    def _group(self, spot: Spot, part: Part, ranks: tuple[int, ...]) -> StatelessGroup:
        if ranks not in self._groups:
            self._groups[ranks] = StatelessGroup.over(
                self._asking, rank=ranks.index(self._rank(part)), ranks=len(ranks), device=self._device,
                name=f"{spot.name} {ranks}", deadline_s=spot.deadline_s, where=f"{spot.host}:{spot.port}",
            )  # fmt: skip
        return self._groups[ranks]
