"""The common way, as a baseline: whole tensors are gathered on one rank and broadcast in buckets to all receivers.

Several buckets are under way at a time, each on a stream of its own, so that gathering, sending and taking apart
overlap (NVIDIA-NeMo/RL, pull request 1379). A pipeline stage keeps to its streams and stages take turns, so that one
stage's tensors are gathered while another's are sent. A receiver gets all of the model, whatever part it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ops.comm.stateless_group import StatelessGroup
from ops.refit.layout import Layout, Place, Tensor, dense, size, whole
from ops.refit.message import Message
from ops.refit.move import Moves
from ops.refit.plan import Copy, build
from ops.refit.streams import Slot, Streams, in_order

BUCKET_BYTES, BUCKETS = 512 << 20, 2
ALIGNED = 256


@dataclass
class _Bucket:
    """Some tensors' way through one rank: what it does before the broadcast, and after it."""

    memory: torch.Tensor
    sent: torch.Tensor | None = None  # to the root
    received: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # by the root
    before: list[Moves] = field(default_factory=list)
    after: list[Moves] = field(default_factory=list)


class Broadcast:
    """One rank of it, as the `number`-th of the senders or of the receivers. `senders` is a group of all senders, whose
    rank 0 is the root; `receivers` one of the root and all receivers, in which the root is rank 0.

    Raises ValueError for sizes that are no whole numbers above 0.
    """

    def __init__(
        self, source: Layout, destination: Layout, *, number: int, receives: bool, buffers: Mapping[str, torch.Tensor],
        senders: StatelessGroup | None, receivers: StatelessGroup | None, bucket_bytes: int = BUCKET_BYTES,
        buckets: int = BUCKETS,
    ) -> None:  # fmt: skip
        for name, value in (("bucket_bytes", bucket_bytes), ("buckets", buckets)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it has to be a whole number above 0")
        self._number, self._receives, self._buffers = number, receives, buffers
        self._senders, self._receivers = senders, receivers
        self._device = next(iter(buffers.values())).device
        groups = list(_in_turns(source, destination.tensors, bucket_bytes, buckets))
        largest = max(at + tensor_bytes for _, group in groups for _, at, tensor_bytes in group)
        root = not receives and number == 0
        slots = {
            slot: torch.empty(largest if receives or root else 0, dtype=torch.uint8, device=self._device)
            for slot in sorted({slot for slot, _ in groups})
        }
        self._messages: dict[tuple[int, int], torch.Tensor] = {}  # memory by slot and peer
        self._buckets = [(slot, self._planned(source, destination, group, slots, slot)) for slot, group in groups]
        self._slots = {slot: Slot(Streams(self._device)) for slot in slots}

    def run(self) -> None:
        """Move this rank's part of a version. Done, on a GPU in order on the current stream, when it returns."""
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

    def _planned(
        self, source: Layout, destination: Layout, group: Sequence[tuple[str, int, int]],
        slots: Mapping[int, torch.Tensor], slot: int,
    ) -> _Bucket:  # fmt: skip
        tensors = {name: destination.tensors[name] for name, _, _ in group}
        middle = Layout(tensors, [[_placed(tensors, name, at) for name, at, _ in group]])
        used = max(at + tensor_bytes for _, at, tensor_bytes in group)
        bucket = _Bucket(slots[slot][:used])
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
        """Memory for a message, which those of one slot share."""
        if len(self._messages.get((slot, peer), ())) < size:
            self._messages[slot, peer] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._messages[slot, peer][:size]


def _in_turns(
    source: Layout, tensors: Mapping[str, Tensor], limit: int, streams: int
) -> Iterable[tuple[int, list[tuple[str, int, int]]]]:
    """Buckets of all tensors, each with its stream: those of a pipeline stage, which is all that the same senders hold,
    on the same ones, and no other stage's on them where there are as many streams as stages."""
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
                yield own[turn % len(own)], made[turn]


def _buckets(tensors: Mapping[str, Tensor], limit: int) -> Iterable[list[tuple[str, int, int]]]:
    """Tensors with their place in a bucket and their bytes; one that is larger is alone."""
    made: list[tuple[str, int, int]] = []
    at = 0
    for name, tensor in tensors.items():
        tensor_bytes = tensor.item_bytes * size(whole(tensor.shape))
        if made and at + tensor_bytes > limit:
            yield made
            made, at = [], 0
        made.append((name, at, tensor_bytes))
        at += -(-tensor_bytes // ALIGNED) * ALIGNED
    if made:
        yield made


def _placed(tensors: Mapping[str, Tensor], name: str, at: int) -> Place:
    return dense(name, whole(tensors[name].shape), tensors[name].item_bytes, "", at)


def _of(layout: Layout, tensors: Mapping[str, Tensor]) -> Layout:
    """The same layout of some of its tensors."""
    return Layout(tensors, [[place for place in places if place.tensor in tensors] for places in layout.ranks])
