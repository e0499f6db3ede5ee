"""One rank's context for transfers: both layouts, its own memory and, if both sides carry, the other ranks.

    meeting = Meeting(device, number=0, receives=True)                 # this rank alone
    meeting = Meeting(device, number=0, receives=True, where=where)    # with all others, through a store
    record = meeting.carry(version, source, destination, buffers, lambda: receiver.receive(meeting, shares, version))

A transport plans, connects and allocates in `once`; the result is kept as long as the same processes meet with the same
layouts and memory. Knows ranks and memory, but not which process serves the store or how failed ranks are handled.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ops.comm.nic import choose
from ops.comm.stateless_group import GroupError, StatelessGroup
from ops.comm.store import Asking
from ops.refit.layout import Layout
from ops.refit.ledger import Ledger
from ops.refit.move import Moves
from ops.refit.plan import Copy, build
from ops.refit.waves import NoSourceError

T = TypeVar("T")
Record = dict[str, float]  # metrics of one version, by name
ALONE = "this transport does not set both_carry, so no other rank takes part in its meetings"


class Where(Protocol):
    """Where processes meet: a store, served by a process that outlives them, and a name that is unique to this set of
    processes. Once the store has an entry under that name, ranks stop waiting for others. No wait exceeds
    `deadline_s`."""

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
    by name, flat bytes on `device`: a sender reads them, a receiver writes them. `lookups` counts the plans,
    connections and buffers that were not reused from the previous version; add those made outside `once`. `ledger`
    counts the memory that `empty` returns.
    """

    source: Layout
    destination: Layout
    buffers: Mapping[str, torch.Tensor]

    def __init__(
        self, device: torch.device, number: int, *, receives: bool, where: Where | None = None,
        ledger: Ledger | None = None,
    ) -> None:  # fmt: skip
        self.device, self.number, self.receives, self.where = device, number, receives, where
        self.ledger = ledger or Ledger(device)
        self.lookups = 0
        self.is_over = False
        self._client: dist.TCPStore | None = None
        self._reached: tuple[str, int] | None = None
        self._kept: dict[tuple[object, ...], Any] = {}
        self._marks: tuple[str, ...] = ()
        self._groups: dict[tuple[int, ...], StatelessGroup] = {}
        self._leaving: list[Callable[[], None]] = []
        self._planned_s = 0.0
        self._known = False  # whether both layouts are known
        self._turn = 0

    def at(self, where: Where | None, number: int) -> Meeting:
        """Return this meeting or, for a new place, its successor in this process, which takes over the connection."""
        if where == self.where and number == self.number and not self.is_over:
            return self
        self.leave()
        following = Meeting(self.device, number, receives=self.receives, where=where, ledger=self.ledger)
        if self._client is not None and where is not None:
            following._client = self._client if (where.host, where.port) == self._reached else None
        return following

    @property
    def senders(self) -> int:
        """Number of senders."""
        return len(self.source.ranks)

    @property
    def receivers(self) -> int:
        """Number of receivers."""
        return len(self.destination.ranks)

    @property
    def rank(self) -> int:
        """This rank's number among all ranks: senders come first."""
        return self.senders + self.number if self.receives else self.number

    @property
    def store(self) -> dist.TCPStore:
        """This process's own connection to the shared store."""
        if self._client is None:
            raise RuntimeError(ALONE)
        return self._client

    @property
    def deadline_s(self) -> float:
        """Time limit of any wait, in seconds."""
        return self._joined.deadline_s

    @property
    def name(self) -> str:
        """Name of this set of processes and memory: the same on all ranks, and unique."""
        return f"{self._joined.name} {' '.join(self._marks)}"

    def carry(
        self, version: int, source: Layout, destination: Layout | None, buffers: Mapping[str, torch.Tensor],
        move: Callable[[], Record], marks: tuple[str, ...] = (),
    ) -> Record:  # fmt: skip
        """Wait for all ranks, then move this rank's part of a version with `move`. `marks` identify the senders' memory
        and are the same on all ranks. Senders do not know the destination: the receivers provide it.

        Adds `lookups` and `move_ms` to the record and, if ranks meet, `meet_ms` until all had arrived and `plan_ms` for
        planning (0 after the first versions). Raises GroupError if a rank did not arrive or a transfer failed;
        ValueError if ranks plan from different layouts or versions.
        """
        with ExitStack() as on_error:
            on_error.callback(self.leave)  # so that no rank waits for one that has failed
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
        if not isinstance(record, Mapping):
            end = "a Receiver's receive()" if destination is not None else "a Sender's send()"
            raise TypeError(f"{end} returned {record!r:.60}; it returns a dict of metrics, which may be empty")
        took_s = time.perf_counter() - met_s
        if self.where is not None:
            times = {"meet_ms": met_s - begun_s, "plan_ms": self._planned_s, "move_ms": took_s - self._planned_s}
        else:
            times = {"move_ms": took_s}
        record = {**record, "lookups": record.get("lookups", 0.0) + self.lookups}
        self.lookups = 0
        return record | {name: 1e3 * part_s for name, part_s in times.items()}

    def once(self, make: Callable[[], T], key: object = None) -> T:
        """Return the result of `make`, which is called once for these layouts and this memory."""
        known = (key, *self._marks)
        if known not in self._kept:
            begun_s = time.perf_counter()
            self._kept[known] = make()
            self._planned_s += time.perf_counter() - begun_s
            self.lookups += 1
        return self._kept[known]

    def empty(self, size: int) -> torch.Tensor:
        """Return `size` uninitialized flat bytes on the device, counted in the refit's memory. Call it in `once` for
        memory that the next version uses again."""
        return self.ledger.empty(size)

    def copies(self) -> list[Copy]:
        """Return the copies that this receiver needs from each sender. Raises ValueError, naming the tensor, if the
        senders lack part of it."""
        return self.once(lambda: build(self.source, self.destination).copies(self.number), "copies")

    def write(self, memories: Mapping[int, torch.Tensor]) -> float:
        """Write the bytes that this receiver needs from some senders' memory: the flat bytes that each sender offered,
        on any device. Returns the number of bytes written."""
        written_bytes = 0
        for rank, memory in memories.items():  # one at a time, so that only one is on the device next to the model
            moves = self.moves({rank: memory.to(self.device)})
            moves.run()
            written_bytes += moves.size
        self.synchronize()
        return float(written_bytes)

    def moves(self, memories: Mapping[int, torch.Tensor]) -> Moves:
        """Return the moves from senders' memory on this device into the buffers."""
        return Moves(
            [copy for copy in self.copies() if copy.source in memories],
            lambda copy: memories[copy.source],
            lambda copy: self.buffers[copy.destination_buffer],
            turn=self.number,
        )

    def synchronize(self) -> None:
        """Wait for the device's pending work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def group(self, ranks: tuple[int, ...] = (), interfaces: Sequence[str] = ()) -> StatelessGroup:
        """Return the group of these ranks (default: all), which include this rank: NCCL between GPUs, gloo between
        CPUs. The first call connects them, on this rank through the first network interface of `interfaces` that is
        up."""
        ranks = ranks or tuple(range(self.senders + self.receivers))
        if ranks not in self._groups:
            where = self._joined
            self._groups[ranks] = group = StatelessGroup.over(
                self._asking, rank=ranks.index(self.rank), ranks=len(ranks), device=self.device,
                name=f"{where.name} {ranks}", interface=choose(interfaces), deadline_s=where.deadline_s,
                where=f"{where.host}:{where.port}", reason=self._asking.reason,
            )  # fmt: skip
            self._leaving.append(group.abandon)
        return self._groups[ranks]

    def finish(self, group: StatelessGroup) -> None:
        """Wait until this rank's sends and receives in a group are done, unless a rank is known to be lost."""
        group.finish(self._joined.deadline_s)

    def on_leaving(self, call: Callable[[], None]) -> None:
        """Register a function to call when this rank leaves without the others."""
        self._leaving.append(call)

    def leave(self) -> None:
        """Leave for good, without the others."""
        for call in self._leaving:
            call()
        self._leaving, self._groups, self._kept, self.is_over = [], {}, {}, True

    @property
    def _joined(self) -> Where:
        if self.where is None:
            raise RuntimeError(ALONE)
        return self.where

    def _note(self, source: Layout, destination: Layout | None) -> None:
        """Set the layouts of a rank that is alone; new layout objects discard everything kept for the old ones."""
        assert destination is not None
        if not self._known or self.source is not source or self.destination is not destination:
            self.source, self.destination, self._kept, self._known = source, destination, {}, True

    def _reach(self, where: Where) -> None:
        """Connect to the store, on the first version."""
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
        """Meet all ranks. Raises ValueError if one plans from a different layout or version."""
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
            self._own.delete_key(f"{self._turn - 1} {self.rank}")  # all have passed it
        self._turn += 1
        if others := [each for each, other in enumerate(said) if other != plan]:
            raise ValueError(
                f"refit, rank {self.rank}: ranks {others} plan from other layouts or another version; all ranks must "
                "use the same. Fix: the same model on all ranks"
            )

    def _agreed(self, destination: Layout | None) -> Layout:
        """Return the destination layout, which the first receiver provides."""
        if destination is None:
            self._asking.wait([f"meeting {self._joined.name}/destination"])
            return msgspec.json.decode(self._own.get("destination"), type=Layout)
        if self.number == 0:
            self._own.set("destination", msgspec.json.encode(destination).decode())
        return destination
