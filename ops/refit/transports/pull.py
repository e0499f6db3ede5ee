"""Every receiver reads what it needs where it lies: on one machine, out of memory that the senders have opened to it.

Straight into the receiver's own storage, by one kernel on a GPU. The sender has nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ops.refit.layout import Layout
from ops.refit.memory import Handle, Kept
from ops.refit.move import Moves
from ops.refit.plan import Copy, build
from ops.refit.share import Share, bytes_of, layout_of

KEPT = 2  # versions whose memory stays open


class Pull:
    """A receiver: one of those that `layout` is the layout of, with its buffers, flat bytes on its device.

    What the shares of two versions have in common (the plan, the tables, opened memory) is kept.
    """

    def __init__(
        self, layout: Layout, receiver: int, buffers: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        self._layout, self._receiver, self._buffers, self._device = layout, receiver, buffers, device
        self._planned: tuple[bytes, ...] = ()
        self._copies: list[Copy] = []
        self._moves: dict[tuple[object, ...], Moves] = {}  # by the memory that is read, of the last versions
        self.lookups = 0  # plans, tables and memory that were not there from the version before

    def run(self, shares: Sequence[Share]) -> int:
        """Bring this receiver's bytes; how many there are. Done when it returns.

        Raises ValueError, naming the tensor, where the shares do not have what this receiver holds.
        """
        if (layouts := tuple(share.layout for share in shares)) != self._planned:
            self._copies, self._moves = build(layout_of(shares), self._layout).copies(self._receiver), {}
            self._planned = layouts
            self.lookups += 1
        far = [rank for rank, share in enumerate(shares) if self._is_far(share)]
        near = [rank for rank in range(len(shares)) if rank not in far]
        self._near(shares, near).run()
        for rank in far:  # one after the other, so that at most one is on the device besides the model
            self._over({rank: bytes_of(shares[rank], self._device).to(self._device)}, [rank]).run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return sum(copy.size for copy in self._copies)

    def close(self) -> None:
        """Give opened memory back."""
        self._moves = {}

    def _near(self, shares: Sequence[Share], ranks: Sequence[int]) -> Moves:
        """Moves from what can be read in place."""
        memories = tuple(shares[rank].memory for rank in ranks)
        if memories not in self._moves:
            if len(self._moves) == KEPT:
                del self._moves[next(iter(self._moves))]
            opened_now = {rank: bytes_of(shares[rank], self._device) for rank in ranks}
            self._moves[memories] = self._over(opened_now, ranks)
            self.lookups += 1
        return self._moves[memories]

    def _over(self, memories: Mapping[int, torch.Tensor], ranks: Sequence[int]) -> Moves:
        return Moves(
            [copy for copy in self._copies if copy.source in ranks],
            lambda copy: memories[copy.source],
            lambda copy: self._buffers[copy.destination_buffer],
            turn=self._receiver,
        )

    def _is_far(self, share: Share) -> bool:
        """Whether the kernel of this device cannot read it."""
        if isinstance(share.memory, np.ndarray):
            return True
        assert not isinstance(share.memory, Kept), "its owner sends it"
        kind = share.memory.device if isinstance(share.memory, Handle) else share.memory.bytes.device.type
        return kind != self._device.type
