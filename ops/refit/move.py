"""Executes a plan's copies between buffers of this process: straight into place, or into or out of a packed buffer.

    moves = Moves(plan.copies(3), lambda copy: trainer[copy.source][copy.source_buffer], lambda copy: ...)
    moves.run()                                    # for every version; plans and allocates nothing

On a GPU one kernel goes through a table of descriptors, so neither the number of copies nor the length of their runs
matters; on the CPU each copy is one strided copy. Buffers are flat bytes. Knows memory, not whose it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ops.refit.plan import Copy
from ops.refit.tiles import WORDS, in_turns, tiles, word_bytes

Buffer = Callable[[Copy], torch.Tensor]


class Moves:
    """Copies and their buffers: flat uint8 tensors, all on one device.

    `turn` is where a receiver starts in the senders' order: receivers that start at different places do not crowd one
    sender. Raises ValueError if a copy exceeds a buffer.
    """

    def __init__(self, copies: Sequence[Copy], source: Buffer, destination: Buffer, *, turn: int = 0) -> None:
        self.size = sum(copy.size for copy in copies)  # bytes
        self._copies = [(copy, source(copy), destination(copy)) for copy in copies]
        for copy, here, there in self._copies:
            name = f"source buffer {copy.source_buffer!r} of rank {copy.source}"
            _check(name, here, copy.source_offset + (copy.rows - 1) * copy.source_stride + copy.run)
            name = f"destination buffer {copy.destination_buffer!r}"
            _check(name, there, copy.destination_offset + (copy.rows - 1) * copy.destination_stride + copy.run)
        self._tables = self.described(turn) if any(there.is_cuda for _, _, there in self._copies) else []

    def run(self) -> None:
        """Move the bytes; on a GPU in order on its current stream."""
        if self._tables:
            from ops.refit.kernel import move

            for word, table in self._tables:
                move(table, word)
            return
        for copy, here, there in self._copies:
            rows = _rows(here, copy.source_offset, copy.source_stride, copy)
            _rows(there, copy.destination_offset, copy.destination_stride, copy).copy_(rows)

    def described(self, turn: int) -> list[tuple[int, torch.Tensor]]:
        """Build the tables by word size: destination and source address, rows, run, destination and source stride, in
        words."""
        made = tiles(
            np.array(
                [
                    (
                        copy.source, there.data_ptr() + copy.destination_offset, here.data_ptr() + copy.source_offset,
                        copy.rows, copy.run, copy.destination_stride, copy.source_stride,
                    )
                    for copy, here, there in self._copies
                ],
                np.int64,
            )
        )  # fmt: skip
        made = made[in_turns(made[:, 0], made[:, 3] * made[:, 4], turn)]
        words = word_bytes(made)
        device = self._copies[0][2].device
        found = []
        for word in WORDS:
            if (own := words == word).any():
                table = made[own, 1:] // np.array([1, 1, 1, word, word, word])
                found.append((word, torch.from_numpy(table).to(device)))
        return found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, in place."""
    return tensor.detach().view(-1).view(torch.uint8)


def _rows(buffer: torch.Tensor, offset: int, stride: int, copy: Copy) -> torch.Tensor:
    return torch.as_strided(buffer, (copy.rows, copy.run), (stride, 1), buffer.storage_offset() + offset)


def _check(name: str, buffer: torch.Tensor, end: int) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"{name} is {buffer.dtype} {list(buffer.shape)}; it must be flat bytes")
    if end > len(buffer):
        raise ValueError(f"{name} has {len(buffer)} bytes; a copy reaches byte {end}")
