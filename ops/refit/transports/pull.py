"""Each receiver reads the bytes that it needs in place, from memory that senders on the same machine share with it.

They are written straight into the receiver's own storage, by one kernel on a GPU. The sender does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops.refit.memory import Handle
from ops.refit.move import Moves
from ops.refit.plan import Copy
from ops.refit.share import Share, bytes_of
from ops.refit.transports.base import Receiver
from ops.refit.transports.meeting import Meeting, Record

OPEN = 2  # versions kept open


class PullReceiver(Receiver):
    """Keeps the plan, the tables and the opened memory of the last two versions."""

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        self._moves: dict[tuple[object, ...], Moves] = {}  # by source memory, for the last versions

    def receive(self, meeting: Meeting, shares: Sequence[Share], version: int) -> Record:
        """Read this rank's part. Raises ValueError, naming the tensor, if the shares lack part of it."""
        if (copies := meeting.copies()) is not self._copies:
            self._copies, self._moves = copies, {}
        far = [rank for rank, share in enumerate(shares) if _is_far(share, meeting)]
        near = [rank for rank in range(len(shares)) if rank not in far]
        self._near(meeting, shares, near).run()
        for rank in far:
            meeting.write({rank: bytes_of(shares[rank], meeting.device)})
        meeting.synchronize()
        return {"received_bytes": float(sum(copy.size for copy in copies))}

    def close(self) -> None:
        """Release opened memory."""
        self._moves = {}

    def _near(self, meeting: Meeting, shares: Sequence[Share], ranks: Sequence[int]) -> Moves:
        """Return the moves from memory that can be read in place."""
        memories = tuple(shares[rank].memory for rank in ranks)
        if memories not in self._moves:
            if len(self._moves) == OPEN:
                del self._moves[next(iter(self._moves))]
            self._moves[memories] = meeting.moves({rank: bytes_of(shares[rank], meeting.device) for rank in ranks})
            meeting.lookups += 1
        return self._moves[memories]


def _is_far(share: Share, meeting: Meeting) -> bool:
    """Return whether this device's kernel cannot read the share."""
    if isinstance(share.memory, np.ndarray):
        return True
    kind = share.memory.device if isinstance(share.memory, Handle) else share.memory.bytes.device.type
    return kind != meeting.device.type
