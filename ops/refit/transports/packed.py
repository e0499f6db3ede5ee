"""Each pair exchanges a few long messages: the sender packs the bytes that a receiver needs, and the receiver unpacks
them.

Uses NCCL between GPUs ("p2p") and gloo on the CPU ("gloo"). Both sides run at the same time. Several slots are in use,
so that packing, sending and unpacking overlap; all memory is allocated before the first transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ops.comm.stateless_group import StatelessGroup
from ops.lots import lots
from ops.refit.ledger import Ledger
from ops.refit.message import ALIGNED, Message
from ops.refit.move import Moves
from ops.refit.plan import Copy, RefitPlan, build
from ops.refit.share import Share
from ops.refit.streams import Slot, Streams, in_order
from ops.refit.transports.base import Receiver, Sender
from ops.refit.transports.meeting import Meeting, Record
from ops.refit.transports.sizes import SLOT_BYTES, SLOTS


class PackedSender(Sender):
    """The sending end, for one trainer rank; the parameters are those of `Gloo`."""

    def __init__(self, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS, interfaces: Sequence[str] = ()) -> None:
        self._parameters = slot_bytes, slots, interfaces

    def send(self, meeting: Meeting, version: int) -> Record:
        """Send each receiver the bytes that it needs from this rank's memory."""
        return _carried(meeting, *self._parameters)


class PackedReceiver(Receiver):
    """The receiving end, for one sampler rank; the parameters are those of the sender."""

    def __init__(self, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS, interfaces: Sequence[str] = ()) -> None:
        self._parameters = slot_bytes, slots, interfaces

    def receive(self, meeting: Meeting, shares: Sequence[Share], version: int) -> Record:
        """Receive the bytes that this rank needs from each sender."""
        return _carried(meeting, *self._parameters)


def _carried(meeting: Meeting, slot_bytes: int, slots: int, interfaces: Sequence[str]) -> Record:
    exchange = meeting.once(lambda: _joined(meeting, slot_bytes, slots, interfaces))
    exchange.run()
    meeting.finish(exchange.group)
    return {"received_bytes": float(exchange.received_bytes)}


def _joined(meeting: Meeting, slot_bytes: int, slots: int, interfaces: Sequence[str]) -> PackedExchange:
    return PackedExchange.of_plan(
        build(meeting.source, meeting.destination), meeting.group(interfaces=interfaces), number=meeting.number,
        receives=meeting.receives, senders=meeting.senders, receivers=meeting.receivers, buffers=meeting.buffers,
        slot_bytes=slot_bytes, slots=slots, empty=meeting.empty,
    )  # fmt: skip


@dataclass(frozen=True)
class _PeerMessage:
    """A message to or from a peer in one round: its memory, and the moves that fill or empty it."""

    peer: int
    memory: torch.Tensor
    moves: Moves


class PackedExchange:
    """One rank's copies to or from its peers, by group rank; both ends have the same copies.

    `buffers` are its own, flat bytes. A message is at most `message_bytes`, or one copy; `slots` messages per peer are
    in memory, which `empty` allocates.
    """

    def __init__(
        self, copies: Mapping[int, Sequence[Copy]], group: StatelessGroup, *, receives: bool,
        buffers: Mapping[str, torch.Tensor], message_bytes: int, slots: int = SLOTS,
        empty: Callable[[int], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.group, self._receives = group, receives
        self.received_bytes = sum(copy.size for own in copies.values() for copy in own) if receives else 0
        device = next(iter(buffers.values())).device
        empty = empty or Ledger(device).empty
        rounds = {peer: _messages(own, message_bytes) for peer, own in copies.items() if own}
        self.rounds = max((len(messages) for messages in rounds.values()), default=0)
        streams = Streams(device)
        self._slots = [Slot(streams) for _ in range(min(slots, self.rounds))]
        memories: list[dict[int, torch.Tensor]] = [
            {peer: empty(max(message.size for message in messages)) for peer, messages in rounds.items()}
            for _ in self._slots
        ]
        self._rounds: list[list[_PeerMessage]] = []
        for index in range(self.rounds):
            memory = memories[index % slots]
            self._rounds.append([])
            for peer, messages in sorted(rounds.items()):
                if index < len(messages):
                    message = messages[index]
                    if receives:
                        moves = message.unpack(memory[peer], lambda copy: buffers[copy.destination_buffer])
                    else:
                        moves = message.pack(lambda copy: buffers[copy.source_buffer], memory[peer])
                    self._rounds[-1].append(_PeerMessage(peer, memory[peer][: message.size], moves))

    def run(self) -> None:
        """Move this rank's part of a version. Complete on return; on a GPU, in order on the current stream."""
        with in_order(self._slots):
            for index, parts in enumerate(self._rounds):
                slot, copies = self._slots[index % len(self._slots)], [part.moves for part in parts]
                if not self._receives:
                    slot.copy(copies)
                with slot.transfer(), self.group.together():
                    for part in parts:
                        (self.group.recv if self._receives else self.group.send)(part.memory, part.peer)
                if self._receives:
                    slot.copy(copies)

    @classmethod
    def of_plan(
        cls, plan: RefitPlan, group: StatelessGroup, *, number: int, receives: bool, senders: int, receivers: int,
        buffers: Mapping[str, torch.Tensor], slot_bytes: int = SLOT_BYTES, slots: int = SLOTS,
        empty: Callable[[int], torch.Tensor] | None = None,
    ) -> PackedExchange:  # fmt: skip
        """Build the exchange of a plan's `number`-th sender or receiver. In the group, senders come first. The messages
        of a round total at most `slot_bytes`, or are one copy each."""
        pairs = _pairs(plan, number, receives, receivers)
        in_group = {peer if receives else senders + peer: copies for peer, copies in pairs.items()}
        share = slot_bytes // max(senders, receivers)
        return cls(in_group, group, receives=receives, buffers=buffers, message_bytes=share, slots=slots, empty=empty)


def _pairs(plan: RefitPlan, number: int, receives: bool, receivers: int) -> dict[int, list[Copy]]:
    """Return the copies that this rank sends or receives, by peer; in the same order on both sides."""
    found: dict[int, list[Copy]] = {}
    for receiver in [number] if receives else range(receivers):
        for copy in plan.copies(receiver):
            if receives or copy.source == number:
                found.setdefault(copy.source if receives else receiver, []).append(copy)
    return found


def _messages(copies: Sequence[Copy], limit: int) -> list[Message]:
    """Group copies into messages of at most `limit` bytes, or of one copy."""
    return [Message(lot) for lot in lots(copies, lambda copy: copy.size, limit, ALIGNED)]
