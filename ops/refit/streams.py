"""Overlaps copies and transfers: one GPU stream for each, and slots of memory that they use in turn.

Transfers have the higher priority. A block of NCCL's kernel takes nearly all registers of an SM (96 for each of 640
threads; NCCL 2.28.9, H200): it starts only on an SM where all blocks of a copy have ended and no new ones follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ops.refit.move import Moves


class Streams:
    """One stream for copies and one for transfers. None on the CPU, where everything runs synchronously."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.copies = torch.cuda.Stream(device) if on_gpu else None
        self.transfers = torch.cuda.Stream(device, priority=-1) if on_gpu else None


class Slot:
    """Memory that copies and transfers use in turn; each starts when the previous one is done."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._done: torch.cuda.Event | None = None

    def copy(self, moves: Sequence[Moves]) -> None:
        """Enqueue these copies."""
        if moves:
            with self._next(self.streams.copies):
                for each in moves:
                    each.run()

    def transfer(self) -> AbstractContextManager[None]:
        """Enqueue the transfers issued inside this context."""
        return self._next(self.streams.transfers)

    @contextmanager
    def _next(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            if self._done is not None:
                stream.wait_event(self._done)
            yield
            self._done = stream.record_event()


@contextmanager
def in_order(slots: Sequence[Slot]) -> Iterator[None]:
    """Order all work of the slots in this context on the current stream: after its earlier work, before its later
    work."""
    found = dict.fromkeys(stream for slot in slots for stream in (slot.streams.copies, slot.streams.transfers))
    for stream in filter(None, found):
        stream.wait_stream(torch.cuda.current_stream())
    yield
    for stream in filter(None, found):
        torch.cuda.current_stream().wait_stream(stream)
