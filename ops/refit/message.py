"""Packs a plan's copies into one contiguous message at the sender, and unpacks it at the receiver.

    message = Message(copies)
    message.pack(trainer_buffer, memory).run()         # then memory[: message.size] is sent
    message.unpack(memory, sampler_buffer).run()

Knows memory, not how it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from msgspec.structs import replace

from ops.refit.move import Buffer, Moves
from ops.refit.plan import Copy

ALIGNED = 16  # bytes; every copy begins at a multiple


class Message:
    """A message of several copies. `size` is in bytes."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self._copies: list[tuple[int, Copy]] = []
        self.size = 0
        for copy in copies:
            start = -(-self.size // ALIGNED) * ALIGNED
            self._copies.append((start, copy))
            self.size = start + copy.size

    def pack(self, source: Buffer, memory: torch.Tensor) -> Moves:
        """Return the moves from the sender's buffers into the message."""
        packed = [replace(copy, destination_offset=at, destination_stride=copy.run) for at, copy in self._copies]
        return Moves(packed, source, lambda _: memory)

    def unpack(self, memory: torch.Tensor, destination: Buffer) -> Moves:
        """Return the moves from the message into the receiver's buffers."""
        packed = [replace(copy, source_offset=at, source_stride=copy.run) for at, copy in self._copies]
        return Moves(packed, lambda _: memory, destination)
