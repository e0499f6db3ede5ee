"""Fan-out in waves: a receiver that has a version forwards it to receivers with equal boxes, as in ops.refit.waves.

    fanout = Fanout(trainer, sampler, store, number=0, receives=True, buffers=parameters)
    carried = fanout.run(version=7)                # on every rank of both sides, for every version

For many receivers and few senders: in each wave a sender sends to one receiver of a kind, and each receiver that has
all of exactly this version is one more source. Ranks agree through `store`, a TCPStore served by a process that
outlives them (ops.refit.agreement). After the first refit, nothing is planned, connected or allocated again.

A rank that dies in a wave is noticed at the other end of its transfer: the connection breaks, or is silent for
`deadline_s` (with NCCL always the latter). All ranks then learn who is gone and who has the version, and replan the
rest, so receivers that lost their source get another one. A rank that died elsewhere is noticed at the next version.
A rank that is gone stays gone: a restarted process takes part in a new Fanout with another `name`.

Each pair that communicates has its own group, so a broken peer breaks no other transfer. With gloo a group costs 5 ms
at first use and, for the tree's lifetime, 0.3 MB, 3 threads and 5 open files; with NCCL, a communicator. A rank's slots
total at most `slots * slot_bytes`, or one copy per message. Meeting takes 4 round trips to the store, and so does each
wave. The store is this process's own client, used only by the tree while a version travels.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from ops.comm.nic import choose
from ops.comm.stateless_group import DEADLINE_S, StatelessGroup
from ops.comm.store import Asking
from ops.refit.agreement import Agreement
from ops.refit.layout import Layout
from ops.refit.plan import SEGMENT_BYTES, Copy, build
from ops.refit.share import Share
from ops.refit.transports.base import Receiver, Sender
from ops.refit.transports.meeting import Meeting, Record
from ops.refit.transports.packed import PackedExchange
from ops.refit.transports.sizes import SLOT_BYTES, SLOTS
from ops.refit.waves import TRAINER, Pair, RankReport, State, Wave, gives, kinds, parts, waves

PATIENCE = 3  # limit for a wave, in deadlines

_log = logging.getLogger(__name__)


class TreeSender(Sender):
    """The sending end, for one trainer rank; the parameters are those of `Fanout`."""

    def __init__(self, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS, interfaces: Sequence[str] = ()) -> None:
        self._parameters = slot_bytes, slots, interfaces

    def send(self, meeting: Meeting, version: int) -> Record:
        """Send the version to the first receivers."""
        return _carried(meeting, version, *self._parameters)


class TreeReceiver(Receiver):
    """The receiving end, for one sampler rank; the parameters are those of the sender."""

    def __init__(self, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS, interfaces: Sequence[str] = ()) -> None:
        self._parameters = slot_bytes, slots, interfaces

    def receive(self, meeting: Meeting, shares: Sequence[Share], version: int) -> Record:
        """Receive the version from a rank that has it, and forward it."""
        return _carried(meeting, version, *self._parameters)


def _carried(meeting: Meeting, version: int, slot_bytes: int, slots: int, interfaces: Sequence[str]) -> Record:
    fanout = meeting.once(lambda: _joined(meeting, slot_bytes, slots, interfaces))
    fanout.held = None  # another transport may have written there since
    carried = fanout.run(version)
    names = ("received_bytes", "sent_bytes", "lookups", "waves", "replans")
    return {name: float(getattr(carried, name)) for name in names}


def _joined(meeting: Meeting, slot_bytes: int, slots: int, interfaces: Sequence[str]) -> Fanout:
    fanout = Fanout(
        meeting.source, meeting.destination, meeting.store, number=meeting.number, receives=meeting.receives,
        buffers=meeting.buffers, name=meeting.name, interfaces=interfaces, deadline_s=meeting.deadline_s,
        slot_bytes=slot_bytes, slots=slots, empty=meeting.empty,
    )  # fmt: skip
    meeting.on_leaving(fanout.abandon)
    return fanout


@dataclass
class Carried:
    """The record of a refit on one rank. `path` is how the version arrived: "direct" from the trainer, "tree" from a
    receiver, "held" if it was already there; "trainer" on a sender. `wave` is the wave in which it arrived, from 0, or
    -1. `waves` is the number of waves, `replans` how often ranks were lost in one. `lookups` counts plans, connections
    and messages not reused from the previous version. `meet_ms` is the wait until all ranks had arrived, `move_ms` this
    rank's own transfers, `agree_ms` the wait until all others had finished theirs."""

    path: str
    wave: int = -1
    waves: int = 0
    replans: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    lookups: int = 0
    meet_ms: float = 0.0
    move_ms: float = 0.0
    agree_ms: float = 0.0


@dataclass(eq=False)
class _TreeEdge:
    """A transfer from a peer or to a peer in a wave."""

    sender: int
    receiver: int
    copies: Sequence[Copy]
    message_bytes: int
    exchange: PackedExchange | None = None


class Fanout:
    """One rank, the `number`-th of the senders or of the receivers of two layouts. Ranks are numbered as in a group:
    senders come first. `buffers` are its own, flat bytes; of the network interfaces `interfaces` it uses the first that
    is up. `deadline_s` limits the wait for the others before a version, and for any message; a wave may take PATIENCE
    times as long. `empty` allocates the memory of messages.

    `held` is the version that a receiver has. Code that overwrites its buffers sets it to None. Raises ValueError,
    naming the tensor, if the source lacks part of the destination.
    """

    def __init__(
        self, source: Layout, destination: Layout, store: dist.Store, *, number: int, receives: bool,
        buffers: Mapping[str, torch.Tensor], name: str = "", interfaces: Sequence[str] = (),
        deadline_s: float = DEADLINE_S, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS,
        empty: Callable[[int], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.held: int | None = None
        self._source, self._destination, self._senders = source, destination, len(source.ranks)
        self._rank, self._receives = (self._senders + number if receives else number), receives
        self._kind = {self._senders + rank: self._senders + first for rank, first in enumerate(kinds(destination))}
        self._store, self._name, self._interfaces, self._deadline_s = store, name, interfaces, deadline_s
        self._buffers, self._slot_bytes, self._slots, self._empty = buffers, slot_bytes, slots, empty
        self._device = next(iter(buffers.values())).device
        build(source, Layout(destination.tensors, [destination.ranks[first] for first in set(kinds(destination))]))
        given = msgspec.msgpack.encode((source, destination, slot_bytes))
        self._digest, self._turn = hashlib.sha256(given).hexdigest(), 0
        self._agreement = Agreement(store, name, self._rank, self._senders)
        self._gone: tuple[int, ...] = ()
        self._plans: dict[State, list[tuple[Wave, list[_TreeEdge]]]] = {}
        self._groups: dict[Pair, StatelessGroup] = {}

    def run(self, version: int) -> Carried:
        """Move this rank's part of a version. On return, all receivers that are not gone have it.

        Raises NoSourceError on all ranks if a receiver lacks it and no rank is left to send it; GroupError on a rank
        that the others continued without, or that lost the store; ValueError if ranks plan from different layouts or
        versions. The rank cannot continue after an error.
        """
        with ExitStack() as on_error:
            on_error.callback(self.abandon)  # so that no rank waits for one that has failed
            record = self._run(version)
            on_error.pop_all()
        return record

    def close(self) -> None:
        """Leave all groups. On GPUs every rank must do so."""
        for group in self._groups.values():
            group.close()
        self._groups, self._plans = {}, {}

    def _run(self, version: int) -> Carried:
        begun_s = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        record = Carried("held" if self._receives else "trainer")
        state = self._met(version)
        record.meet_ms = 1e3 * (time.perf_counter() - begun_s)
        while True:
            if state not in self._plans:
                self._plans[state] = self._planned(state)
                record.lookups += 1
            for wave, edges in self._plans[state]:
                holders = sorted({*state.holders, *(rank for rank, _ in wave)})
                hoped = msgspec.structs.replace(state, holders=tuple(holders))
                state = self._carried(version, wave, edges, state, record)
                record.waves += 1
                if state != hoped:
                    record.replans += 1
                    self._drop(state)
                    break
            else:
                return record

    def _met(self, version: int) -> State:
        """Meet all remaining ranks and learn which have the version already."""
        self._turn += 1
        state = State(gone=self._gone)
        expected = [rank for rank in range(self._senders + len(self._kind)) if rank not in self._gone]
        holds = self._receives and self.held == version
        report = RankReport(self._rank, holds=holds, plan=f"{self._digest} {version}")
        state = self._agreement.settle(f"{self._turn}/", state, expected, report, wait_s=self._deadline_s)
        self._agreement.forget()
        if state.gone != self._gone:
            self._drop(state)
        return state

    def _carried(self, version: int, wave: Wave, edges: Sequence[_TreeEdge], state: State, record: Carried) -> State:
        """Run a wave. Returns the state after it."""
        stage = f"{self._turn}/{record.waves}"
        giver = next((source for receiver, source in wave if receiver == self._rank), None)
        expected = {rank for pair in wave for rank in pair if rank != TRAINER}
        if any(source == TRAINER for _, source in wave):
            expected |= set(range(self._senders)) - set(state.gone)
        record.lookups += sum(edge.exchange is None for edge in edges)
        record.lookups += len({(edge.sender, edge.receiver) for edge in edges} - self._groups.keys())
        if giver is not None:
            self.held = None
        begun_s = time.perf_counter()
        lost = self._moved(stage, edges)
        moved_s = time.perf_counter()
        if giver is not None and not lost:
            self.held = version
            record.path, record.wave = ("direct" if giver == TRAINER else "tree"), record.waves
        for edge in set(edges) - set(lost):
            size = sum(copy.size for copy in edge.copies)
            record.received_bytes += size if edge.receiver == self._rank else 0
            record.sent_bytes += size if edge.sender == self._rank else 0
        lacking = tuple(edge.sender for edge in lost if edge.receiver == self._rank)
        report = RankReport(self._rank, holds=self._receives and self.held == version, lost=lacking)
        state = self._agreement.settle(
            stage, state, expected, report if self._rank in expected else None,
            unheard=[edge.sender + edge.receiver - self._rank for edge in lost], wait_s=PATIENCE * self._deadline_s,
        )  # fmt: skip
        record.move_ms += 1e3 * (moved_s - begun_s)
        record.agree_ms += 1e3 * (time.perf_counter() - moved_s)
        return state

    def _moved(self, stage: str, edges: Sequence[_TreeEdge]) -> list[_TreeEdge]:
        """Run edges in parallel. Returns those that failed."""
        if not edges:
            return []
        with ThreadPoolExecutor(len(edges)) as pool:
            went = list(pool.map(lambda edge: self._went(stage, edge), edges))
        return [edge for edge, through in zip(edges, went) if not through]

    def _went(self, stage: str, edge: _TreeEdge) -> bool:
        pair, receives = (edge.sender, edge.receiver), edge.receiver == self._rank
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            try:
                if pair not in self._groups:
                    self._groups[pair] = self._joined(stage, pair)
            except RuntimeError as error:
                return self._lost(stage, pair, error)
            if edge.exchange is None:
                edge.exchange = PackedExchange(
                    {0 if receives else 1: edge.copies}, self._groups[pair], receives=receives, buffers=self._buffers,
                    message_bytes=edge.message_bytes, slots=self._slots, empty=self._empty,
                )  # fmt: skip
            try:
                edge.exchange.run()
                self._groups[pair].finish(self._deadline_s)
            except RuntimeError as error:
                return self._lost(stage, pair, error)
        return True

    def _joined(self, stage: str, pair: Pair) -> StatelessGroup:
        store = Asking(self._store, self._deadline_s)
        name = f"{self._name} {stage} {pair}"
        return StatelessGroup.over(
            store, rank=pair.index(self._rank), ranks=2, device=self._device, name=name,
            interface=choose(self._interfaces), deadline_s=self._deadline_s,
        )  # fmt: skip

    def _lost(self, stage: str, pair: Pair, error: RuntimeError) -> bool:
        _log.warning("refit, version and wave %s: the transfer from rank %d to %d failed: %s", stage, *pair, error)
        self._agreement.here(stage)
        return False

    def _drop(self, state: State) -> None:
        """Drop plans, and connections to ranks that are gone or unreachable."""
        self._gone, self._plans = state.gone, {}
        for sender, receiver in list(self._groups):
            source = TRAINER if sender < self._senders else sender
            if {sender, receiver} & set(state.gone) or (receiver, source) in state.failed:
                self._groups.pop((sender, receiver)).abandon()

    def abandon(self) -> None:
        """Leave all groups without the others."""
        for group in self._groups.values():
            group.abandon()
        self._groups, self._plans = {}, {}

    def _planned(self, state: State) -> list[tuple[Wave, list[_TreeEdge]]]:
        """Return the remaining waves, with this rank's part in each."""
        places = [[] if rank in state.gone else own for rank, own in enumerate(self._source.ranks)]
        source, to, of_kinds = Layout(self._source.tensors, places), self._destination, set(self._kind.values())
        made = waves(self._kind, state, of_kinds if source == self._source else gives(source, to, self._kind))
        message_bytes = self._slot_bytes // max(1, len(made) * max(len(of_kinds), self._senders))
        segment_bytes = max(1, min(SEGMENT_BYTES, message_bytes))
        own = [sorted(parts(wave, source, to, self._rank, segment_bytes).items()) for wave in made]
        edges = [[_TreeEdge(*pair, copies, message_bytes) for pair, copies in of_wave] for of_wave in own]
        return list(zip(made, edges))
