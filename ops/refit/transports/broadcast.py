"""The common method, as a baseline: gathers whole tensors on one rank and broadcasts them in buckets to all receivers.

Several buckets are in flight, each on its own stream, so that gather, send and unpack overlap (NVIDIA-NeMo/RL, pull
request 1379). A pipeline stage keeps to its streams and stages take turns, so one stage's tensors are gathered while
another's are sent. Every receiver gets the whole model, even if it needs only a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from ops.comm.stateless_group import StatelessGroup
from ops.lots import lots
from ops.refit.layout import Layout, Place, Tensor, dense, size, whole
from ops.refit.ledger import Ledger
from ops.refit.message import Message
from ops.refit.move import Moves
from ops.refit.plan import Copy, build
from ops.refit.share import Share
from ops.refit.streams import Slot, Streams, in_order
from ops.refit.transports.base import Receiver, Sender
from ops.refit.transports.meeting import Meeting, Record
from ops.refit.transports.sizes import BUCKET_BYTES, BUCKETS, wrong

ALIGNED = 256


class BroadcastSender(Sender):
    """The sending end, for one trainer rank; the parameters are those of `Broadcast`."""

    def __init__(
        self, bucket_bytes: int = BUCKET_BYTES, buckets: int = BUCKETS, interfaces: Sequence[str] = ()
    ) -> None:
        self._parameters = bucket_bytes, buckets, interfaces

    def send(self, meeting: Meeting, version: int) -> Record:
        """Gather on the root, and broadcast from it."""
        meeting.finish(_carried(meeting, *self._parameters))
        return {"received_bytes": 0.0}


class BroadcastReceiver(Receiver):
    """The receiving end, for one sampler rank; the parameters are those of the sender."""

    def __init__(
        self, bucket_bytes: int = BUCKET_BYTES, buckets: int = BUCKETS, interfaces: Sequence[str] = ()
    ) -> None:
        self._parameters = bucket_bytes, buckets, interfaces

    def receive(self, meeting: Meeting, shares: Sequence[Share], version: int) -> Record:
        """Receive the whole model."""
        meeting.finish(_carried(meeting, *self._parameters))
        tensors = meeting.destination.tensors.values()
        return {"received_bytes": float(sum(tensor.item_bytes * prod(tensor.shape) for tensor in tensors))}


def _carried(meeting: Meeting, bucket_bytes: int, buckets: int, interfaces: Sequence[str]) -> StatelessGroup:
    """Run this rank's buckets. Returns a group that it is in."""
    joined = meeting.once(lambda: _joined(meeting, bucket_bytes, buckets, interfaces))
    joined.run()
    return joined.group


def _joined(meeting: Meeting, bucket_bytes: int, buckets: int, interfaces: Sequence[str]) -> Buckets:
    senders = tuple(range(meeting.senders))
    takers = (0, *range(meeting.senders, meeting.senders + meeting.receivers))
    return Buckets(
        meeting.source, meeting.destination, number=meeting.number, receives=meeting.receives, buffers=meeting.buffers,
        senders=meeting.group(senders, interfaces) if len(senders) > 1 and not meeting.receives else None,
        receivers=meeting.group(takers, interfaces) if meeting.rank in takers else None, bucket_bytes=bucket_bytes,
        buckets=buckets, empty=meeting.empty,
    )  # fmt: skip


@dataclass(frozen=True)
class _PlacedTensor:
    """A tensor's place in a bucket."""

    name: str
    offset: int
    size: int  # bytes

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.offset + self.size


@dataclass(frozen=True)
class _Turn:
    """The tensors of a bucket and their stream."""

    stream: int
    tensors: list[_PlacedTensor]

    @property
    def size(self) -> int:
        """Size of the bucket in bytes."""
        return self.tensors[-1].end


@dataclass
class _Bucket:
    """One bucket on one rank: its memory, and the moves before and after the broadcast."""

    memory: torch.Tensor
    sent: torch.Tensor | None = None  # to the root
    received: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # by the root, from a peer
    before: list[Moves] = field(default_factory=list)
    after: list[Moves] = field(default_factory=list)


class Buckets:
    """All buckets of one rank, the `number`-th of the senders or of the receivers. `senders` is the group of all
    senders, with the root as rank 0; `receivers` is the group of the root, as rank 0, and all receivers. `empty`
    allocates their memory.

    Raises ValueError for sizes that are not whole numbers of at least 1.
    """

    def __init__(
        self, source: Layout, destination: Layout, *, number: int, receives: bool, buffers: Mapping[str, torch.Tensor],
        senders: StatelessGroup | None, receivers: StatelessGroup | None, bucket_bytes: int = BUCKET_BYTES,
        buckets: int = BUCKETS, empty: Callable[[int], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        for why, _ in wrong({"bucket_bytes": bucket_bytes, "buckets": buckets}):
            raise ValueError(f"bucket_bytes={bucket_bytes!r}, buckets={buckets!r}: {why}")
        self._number, self._receives, self._buffers = number, receives, buffers
        self._senders, self._receivers = senders, receivers
        self._device = next(iter(buffers.values())).device
        self._empty = empty or Ledger(self._device).empty
        turns = list(_in_turns(source, destination.tensors, bucket_bytes, buckets))
        largest = max(turn.size for turn in turns)
        root = not receives and number == 0
        slots = {
            slot: self._empty(largest if receives or root else 0) for slot in sorted({turn.stream for turn in turns})
        }
        self._messages: dict[tuple[int, int], torch.Tensor] = {}  # memory by slot and peer
        self._buckets = [(turn.stream, self._planned(source, destination, turn, slots)) for turn in turns]
        self._slots = {slot: Slot(Streams(self._device)) for slot in slots}

    @property
    def group(self) -> StatelessGroup:
        """A group that this rank is in."""
        group = self._receivers or self._senders
        assert group is not None
        return group

    def run(self) -> None:
        """Move this rank's part of a version. Complete on return; on a GPU, in order on the current stream."""
        with in_order(list(self._slots.values())):
            for slot, bucket in self._buckets:
                self._carry(self._slots[slot], bucket)

    def _carry(self, slot: Slot, bucket: _Bucket) -> None:
        if bucket.sent is not None:
            slot.copy(bucket.before)
        if self._senders is not None and (bucket.sent is not None or bucket.received):
            with slot.transfer(), self._senders.together():
                if bucket.sent is not None:
                    self._senders.send(bucket.sent, 0)
                for peer, memory in bucket.received:
                    self._senders.recv(memory, peer)
        if bucket.sent is None:
            slot.copy(bucket.before)
        if self._receivers is not None:
            with slot.transfer():
                self._receivers.broadcast(bucket.memory, 0)
        slot.copy(bucket.after)

    def _planned(self, source: Layout, destination: Layout, turn: _Turn, slots: Mapping[int, torch.Tensor]) -> _Bucket:
        tensors = {placed.name: destination.tensors[placed.name] for placed in turn.tensors}
        middle = Layout(tensors, [[_place(tensors, placed) for placed in turn.tensors]])
        slot, bucket = turn.stream, _Bucket(slots[turn.stream][: turn.size])
        if self._receives:
            copies = build(middle, _of(destination, tensors)).copies(self._number)
            bucket.after = [Moves(copies, lambda _: bucket.memory, lambda copy: self._buffers[copy.destination_buffer])]
            return bucket
        by_sender: dict[int, list[Copy]] = {}
        for copy in build(_of(source, tensors), middle).copies(0):
            by_sender.setdefault(copy.source, []).append(copy)
        own = by_sender.pop(self._number, [])
        if self._number > 0:
            if own:
                message = Message(own)
                bucket.sent = self._message(slot, 0, message.size)
                bucket.before = [message.pack(self._source, bucket.sent)]
            return bucket
        bucket.before = [Moves(own, self._source, lambda _: bucket.memory)]
        for peer, copies in sorted(by_sender.items()):
            message = Message(copies)
            bucket.received.append((peer, self._message(slot, peer, message.size)))
            bucket.before.append(message.unpack(bucket.received[-1][1], lambda _: bucket.memory))
        return bucket

    def _source(self, copy: Copy) -> torch.Tensor:
        return self._buffers[copy.source_buffer]

    def _message(self, slot: int, peer: int, size: int) -> torch.Tensor:
        """Return memory for a message, shared by the messages of one slot."""
        if len(self._messages.get((slot, peer), ())) < size:
            self._messages[slot, peer] = self._empty(size)
        return self._messages[slot, peer][:size]


def _in_turns(source: Layout, tensors: Mapping[str, Tensor], limit: int, streams: int) -> Iterable[_Turn]:
    """Yield buckets of all tensors, each with its stream. A pipeline stage (all tensors held by the same senders) uses
    its own streams, shared with no other stage if there are at least as many streams as stages."""
    holders: dict[str, tuple[int, ...]] = {}
    for rank, places in enumerate(source.ranks):
        for name in dict.fromkeys(place.tensor for place in places):
            holders[name] = (*holders.get(name, ()), rank)
    stages = [
        list(_buckets({name: tensor for name, tensor in tensors.items() if holders.get(name) == stage}, limit))
        for stage in dict.fromkeys(map(holders.get, tensors))
    ]
    for turn in range(max(map(len, stages))):
        for stage, made in enumerate(stages):
            own = range(stage % streams, streams, len(stages))
            if turn < len(made):
                yield _Turn(own[turn % len(own)], made[turn])


def _buckets(tensors: Mapping[str, Tensor], limit: int) -> Iterable[list[_PlacedTensor]]:
    """Yield tensors with their places in buckets of at most `limit` bytes; a larger tensor gets its own bucket."""
    sizes = {name: tensor.item_bytes * size(whole(tensor.shape)) for name, tensor in tensors.items()}
    for names in lots(sizes, sizes.__getitem__, limit, ALIGNED):
        placed: list[_PlacedTensor] = []
        for name in names:
            offset = -(-placed[-1].end // ALIGNED) * ALIGNED if placed else 0
            placed.append(_PlacedTensor(name, offset, sizes[name]))
        yield placed


def _place(tensors: Mapping[str, Tensor], placed: _PlacedTensor) -> Place:
    tensor = tensors[placed.name]
    return dense(placed.name, whole(tensor.shape), tensor.item_bytes, "", placed.offset)


def _of(layout: Layout, tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout restricted to some of its tensors."""
    return Layout(tensors, [[place for place in places if place.tensor in tensors] for places in layout.ranks])
