"""Every pair exchanges few long messages: the sender packs what a receiver lacks, and the receiver unpacks it.

Between machines by NCCL ("p2p"), on the CPU by gloo ("gloo"). Both sides run it together. Several slots are in use at a
time, so that packing, sending and unpacking overlap; all memory is there before the first version travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ops.comm.stateless_group import StatelessGroup
from ops.refit.message import ALIGNED, Message
from ops.refit.move import Moves
from ops.refit.plan import Copy, Plan
from ops.refit.streams import Slot, Streams, in_order

SLOT_BYTES, SLOTS = 192 << 20, 3


class Exchange:
    """One rank's part of copies between it and its peers, by their ranks in the group; both ends have the same copies.

    `buffers` are its own, flat bytes. A message is at most `message_bytes`, or one copy; `slots` of them a peer are in
    memory.
    """

    def __init__(
        self, copies: Mapping[int, Sequence[Copy]], group: StatelessGroup, *, receives: bool,
        buffers: Mapping[str, torch.Tensor], message_bytes: int, slots: int = SLOTS,
    ) -> None:  # fmt: skip
        self._group, self._receives = group, receives
        device = next(iter(buffers.values())).device
        rounds = {peer: _messages(own, message_bytes) for peer, own in copies.items()}
        self.rounds = max((len(messages) for messages in rounds.values()), default=0)
        streams = Streams(device)
        self._slots = [Slot(streams) for _ in range(min(slots, self.rounds))]
        memories: list[dict[int, torch.Tensor]] = [
            {
                peer: torch.empty(max(message.size for message in messages), dtype=torch.uint8, device=device)
                for peer, messages in rounds.items()
            }
            for _ in self._slots
        ]
        self._rounds: list[list[tuple[int, torch.Tensor, Moves]]] = []
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
                    self._rounds[-1].append((peer, memory[peer][: message.size], moves))

    def run(self) -> None:
        """Move this rank's part of a version. Done, on a GPU in order on the current stream, when it returns."""
        with in_order(self._slots):
            for index, messages in enumerate(self._rounds):
                slot, copies = self._slots[index % len(self._slots)], [moves for _, _, moves in messages]
                if not self._receives:
                    slot.copy(copies)
                with slot.transfer():
                    self._carry(messages)
                if self._receives:
                    slot.copy(copies)

    def _carry(self, messages: Sequence[tuple[int, torch.Tensor, Moves]]) -> None:
        with self._group.together():
            for peer, memory, _ in messages:
                (self._group.recv if self._receives else self._group.send)(memory, peer)


class Packed(Exchange):
    """One rank, as the `number`-th of the senders or of the receivers of a plan. In the group, senders come first.

    `buffers` are its own, flat bytes. Messages of a round are `slot_bytes` together at most, or one copy each; `slots`
    of them a peer are in memory.
    """

    def __init__(
        self, plan: Plan, group: StatelessGroup, *, number: int, receives: bool, senders: int, receivers: int,
        buffers: Mapping[str, torch.Tensor], slot_bytes: int = SLOT_BYTES, slots: int = SLOTS,
    ) -> None:  # fmt: skip
        pairs = _pairs(plan, number, receives, receivers)
        in_group = {peer if receives else senders + peer: copies for peer, copies in pairs.items()}
        share = slot_bytes // max(senders, receivers)
        super().__init__(in_group, group, receives=receives, buffers=buffers, message_bytes=share, slots=slots)


def _pairs(plan: Plan, number: int, receives: bool, receivers: int) -> dict[int, list[Copy]]:
    """What this rank gives or gets, by peer; in the same order on both sides."""
    found: dict[int, list[Copy]] = {}
    for receiver in [number] if receives else range(receivers):
        for copy in plan.copies(receiver):
            if receives or copy.source == number:
                found.setdefault(copy.source if receives else receiver, []).append(copy)
    return found


def _messages(copies: Sequence[Copy], limit: int) -> list[Message]:
    """Copies in messages of at most `limit` bytes, or of one copy."""
    made = [Message()]
    for copy in copies:
        if made[-1].size and made[-1].size + ALIGNED + copy.size > limit:
            made.append(Message())
        made[-1].add(copy)
    return made
