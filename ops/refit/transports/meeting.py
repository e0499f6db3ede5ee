"""What one rank has for the versions that come: both layouts, its own memory, and, where both sides carry, the others.

    meeting = Meeting(device, number=0, receives=True)                 # this rank alone
    meeting = Meeting(device, number=0, receives=True, where=where)    # with all others, at a store
    record = meeting.carry(version, source, destination, buffers, lambda: receiver.receive(meeting, shares, version))

A transport plans, connects and allocates in `once`, and what it makes stays as long as the same processes meet with the
same layouts and memory. Knows ranks and memory; it does not know who serves the store, nor what becomes of a rank that
does not get through.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ops.comm.stateless_group import GroupError, StatelessGroup
from ops.comm.store import Asking
from ops.refit.layout import Layout
from ops.refit.move import Moves
from ops.refit.plan import Copy, build
from ops.refit.waves import NoSourceError

T = TypeVar("T")
Record = dict[str, float]  # numbers about one version, by name
ALONE = "this transport does not say both_carry, so nobody else takes part in its meetings"


class Where(Protocol):
    """Where processes meet: a store that somebody serves who outlives them, and a name that no other processes have,
    nor these together with others. Once the store has something under that name, nobody waits here any more. No wait
    takes longer than `deadline_s`."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def deadline_s(self) -> float: ...


class Meeting:
    """One rank: the `number`-th of the senders or of the receivers of two layouts.

    `source` and `destination` are the layouts of all senders and of all receivers. `buffers` are this rank's own memory
    by name, flat bytes on `device`: a sender reads them, a receiver writes them. `lookups` counts what was not there
    from the version before; what is opened or connected outside `once` is added to it.
    """

    source: Layout
    destination: Layout
    buffers: Mapping[str, torch.Tensor]

    def __init__(self, device: torch.device, number: int, *, receives: bool, where: Where | None = None) -> None:
        self.device, self.number, self.receives, self.where = device, number, receives, where
        self.lookups = 0
        self.is_over = False
        self._client: dist.TCPStore | None = None
        self._reached: tuple[str, int] | None = None
        self._kept: dict[tuple[object, ...], Any] = {}
        self._marks: tuple[str, ...] = ()
        self._groups: dict[tuple[int, ...], StatelessGroup] = {}
        self._leaving: list[Callable[[], None]] = []
        self._planned_s = 0.0
        self._known = False  # both layouts
        self._turn = 0

    def at(self, where: Where | None, number: int) -> Meeting:
        """This one, or the next one of the same process, at another place; it takes the connection over."""
        if where == self.where and number == self.number and not self.is_over:
            return self
        self.leave()
        following = Meeting(self.device, number, receives=self.receives, where=where)
        if self._client is not None and where is not None:
            following._client = self._client if (where.host, where.port) == self._reached else None
        return following

    @property
    def senders(self) -> int:
        """How many there are."""
        return len(self.source.ranks)

    @property
    def receivers(self) -> int:
        """How many there are."""
        return len(self.destination.ranks)

    @property
    def rank(self) -> int:
        """This rank's number among all: senders come first."""
        return self.senders + self.number if self.receives else self.number

    @property
    def store(self) -> dist.TCPStore:
        """This process's own connection to the store where all meet."""
        if self._client is None:
            raise RuntimeError(ALONE)
        return self._client

    @property
    def deadline_s(self) -> float:
        """How long any wait may take."""
        return self._joined.deadline_s

    @property
    def name(self) -> str:
        """Of what these processes do with this memory: the same on all ranks, and no others have it."""
        return f"{self._joined.name} {' '.join(self._marks)}"

    def carry(
        self, version: int, source: Layout, destination: Layout | None, buffers: Mapping[str, torch.Tensor],
        move: Callable[[], Record], marks: tuple[str, ...] = (),
    ) -> Record:  # fmt: skip
        """Have this rank's part of a version moved by `move`, when all ranks are there. `marks` say from which memory
        the senders send, and are the same on all ranks. Senders do not know the destination: the receivers say it.

        Adds to the record `lookups` and `move_ms`; and, where ranks meet, `meet_ms` until all were there and `plan_ms`
        until they knew what to do (0 after the first versions). Raises GroupError where a rank did not come or get
        through; ValueError where ranks do not plan from the same.
        """
        with ExitStack() as on_error:
            on_error.callback(self.leave)  # so that nobody waits for a rank that does not go on
            self.buffers, self._marks, self._planned_s = buffers, marks, 0.0
            begun_s = met_s = time.perf_counter()
            if self.where is None:
                self._note(source, destination)
                record = move()
            else:
                try:
                    self._reach(self.where)
                    self._gather(version, source, destination)
                    met_s = time.perf_counter()
                    record = move()
                except NoSourceError as error:
                    raise GroupError(str(error)) from error
                except GroupError:
                    raise
                except RuntimeError as error:
                    raise GroupError(f"{self.where.name}: {error}") from error
            on_error.pop_all()
        took_s = time.perf_counter() - met_s
        if self.where is not None:
            times = {"meet_ms": met_s - begun_s, "plan_ms": self._planned_s, "move_ms": took_s - self._planned_s}
        else:
            times = {"move_ms": took_s}
        record = {**record, "lookups": record.get("lookups", 0.0) + self.lookups}
        self.lookups = 0
        return record | {name: 1e3 * part_s for name, part_s in times.items()}

    def once(self, make: Callable[[], T], key: object = None) -> T:
        """What `make` returned the first time, with these layouts and this memory."""
        known = (key, *self._marks)
        if known not in self._kept:
            begun_s = time.perf_counter()
            self._kept[known] = make()
            self._planned_s += time.perf_counter() - begun_s
            self.lookups += 1
        return self._kept[known]

    def copies(self) -> list[Copy]:
        """What this receiver lacks of each sender's memory. Raises ValueError, naming the tensor, where the senders do
        not have what it holds."""
        return self.once(lambda: build(self.source, self.destination).copies(self.number), "copies")

    def write(self, memories: Mapping[int, torch.Tensor]) -> float:
        """Write what this receiver needs of the memory of some senders: the bytes that each of them offered, flat, on
        any device. Returns how many bytes were written."""
        written_bytes = 0
        for rank, memory in memories.items():  # one after the other, so that one is on the device besides the model
            moves = self.moves({rank: memory.to(self.device)})
            moves.run()
            written_bytes += moves.size
        self.synchronize()
        return float(written_bytes)

    def moves(self, memories: Mapping[int, torch.Tensor]) -> Moves:
        """From memory of senders that lies on this device into the buffers."""
        return Moves(
            [copy for copy in self.copies() if copy.source in memories],
            lambda copy: memories[copy.source],
            lambda copy: self.buffers[copy.destination_buffer],
            turn=self.number,
        )

    def synchronize(self) -> None:
        """Wait for what the device has to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def group(self, ranks: tuple[int, ...] = ()) -> StatelessGroup:
        """The group of these ranks, by default of all: over NCCL between GPUs, over gloo between CPUs. This rank is one
        of them. The first call connects them."""
        ranks = ranks or tuple(range(self.senders + self.receivers))
        if ranks not in self._groups:
            where = self._joined
            self._groups[ranks] = group = StatelessGroup.over(
                self._asking, rank=ranks.index(self.rank), ranks=len(ranks), device=self.device,
                name=f"{where.name} {ranks}", deadline_s=where.deadline_s, where=f"{where.host}:{where.port}",
            )  # fmt: skip
            self._leaving.append(group.abandon)
        return self._groups[ranks]

    def finish(self, group: StatelessGroup) -> None:
        """Wait until what this rank sent and received in a group is done, unless a rank is known to be lost."""
        group.finish(self._joined.deadline_s, over=lambda: bool(self.store.check([self._joined.name])))

    def on_leaving(self, call: Callable[[], None]) -> None:
        """Have something called when this rank leaves without the others."""
        self._leaving.append(call)

    def leave(self) -> None:
        """Leave, without the others, for good."""
        for call in self._leaving:
            call()
        self._leaving, self._groups, self._kept, self.is_over = [], {}, {}, True

    @property
    def _joined(self) -> Where:
        if self.where is None:
            raise RuntimeError(ALONE)
        return self.where

    def _note(self, source: Layout, destination: Layout | None) -> None:
        """What this rank alone has is the same as long as these objects are."""
        assert destination is not None
        if not self._known or self.source is not source or self.destination is not destination:
            self.source, self.destination, self._kept, self._known = source, destination, {}, True

    def _reach(self, where: Where) -> None:
        """Reach the store, at the first version."""
        if self._reached:
            return
        self._client = self._client or dist.TCPStore(
            where.host, where.port, is_master=False, timeout=timedelta(seconds=where.deadline_s),
            wait_for_workers=False, use_libuv=False,
        )  # fmt: skip
        self._reached = where.host, where.port
        self._asking = Asking(self._client, where.deadline_s, over=where.name)
        self._own = dist.PrefixStore(f"meeting {where.name}", self._client)
        self.lookups += 1

    def _gather(self, version: int, source: Layout, destination: Layout | None) -> None:
        """Meet all ranks, and see that they plan from the same. Raises ValueError where one does not."""
        if not self._known or (source is not self.source and source != self.source):
            self.source, self._kept, self._known = source, {}, True
            self.destination = self._agreed(destination)
            agreed = msgspec.msgpack.encode((source, self.destination))
            self._digest = hashlib.sha256(agreed).hexdigest()
            self.lookups += 1
        plan, ranks = f"{self._digest} {version}", self.senders + self.receivers
        self._own.set(f"{self._turn} {self.rank}", plan)
        keys = [f"{self._turn} {each}" for each in range(ranks)]
        self._asking.wait([f"meeting {self._joined.name}/{key}" for key in keys])
        said = [bytes(value).decode() for value in self._own.multi_get(keys)]
        if self._turn:
            self._own.delete_key(f"{self._turn - 1} {self.rank}")  # all are past it
        self._turn += 1
        if others := [each for each, other in enumerate(said) if other != plan]:
            raise ValueError(
                f"refit, rank {self.rank}: ranks {others} plan from other layouts, or another version; every rank has "
                "to know the same. Fix: the same model on all ranks"
            )

    def _agreed(self, destination: Layout | None) -> Layout:
        """The destination, which the first receiver says."""
        if destination is None:
            self._asking.wait([f"meeting {self._joined.name}/destination"])
            return msgspec.json.decode(self._own.get("destination"), type=Layout)
        if self.number == 0:
            self._own.set("destination", msgspec.json.encode(destination).decode())
        return destination
