"""Copies and transfers beside each other: a GPU's stream for either, and slots of memory that their steps take in turn.

Transfers have the higher priority. A block of NCCL's kernel takes nearly all registers of a core (96 for each of 640
threads; NCCL 2.28.9, H200): it begins where all blocks of a copy have ended, and no others may follow them there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ops.refit.move import Moves


class Streams:
    """A stream for copies and one for transfers. There is none on the CPU, where all is done at once."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.copies = torch.cuda.Stream(device) if on_gpu else None
        self.transfers = torch.cuda.Stream(device, priority=-1) if on_gpu else None


class Slot:
    """Memory that copies and transfers use in turn: each begins when the one before it is done."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._done: torch.cuda.Event | None = None

    def copy(self, moves: Sequence[Moves]) -> None:
        """These are next."""
        if moves:
            with self._next(self.streams.copies):
                for each in moves:
                    each.run()

    def transfer(self) -> AbstractContextManager[None]:
        """What is sent and received inside is next."""
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
    """All that slots do inside is, as the current stream sees it, done here: after what it has, before what it gets."""
    found = dict.fromkeys(stream for slot in slots for stream in (slot.streams.copies, slot.streams.transfers))
    for stream in filter(None, found):
        stream.wait_stream(torch.cuda.current_stream())
    yield
    for stream in filter(None, found):
        torch.cuda.current_stream().wait_stream(stream)
