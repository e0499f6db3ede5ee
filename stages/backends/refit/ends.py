"""Both ends of a refit that trainer and sampler carry out together, as engines have them. Knows shares and meetings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ops.comm.stateless_group import GroupError
from ops.refit.layout import Layout
from ops.refit.memory import Kept
from ops.refit.share import Publisher, Share, layout_of
from ops.refit.transports.meeting import Ends, Part, Spot
from pipeline.errors import PeerLost, Problem
from stages.backends.interface import Route


class Sender:
    """A trainer's rank."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._ends, self._rank = Ends(device), rank

    def carry(self, publisher: Publisher, shares: Sequence[Share], version: int, route: Route) -> None:
        """Send this rank's part of a version. Raises PeerLost where another worker did not get through."""
        kept = shares[self._rank].memory
        assert isinstance(kept, Kept)
        buffers = {"": publisher.memory(kept)}
        try:
            _carried(self._ends, shares, version, route, None, number=self._rank, receives=False, buffers=buffers)
        except GroupError as error:
            raise peer_lost(error) from error


class Together:
    """A sampler's rank: the `rank`-th of a replica whose ranks hold the model as `layout` says."""

    def __init__(
        self, device: torch.device, buffers: Mapping[str, torch.Tensor], rank: int, layout: Layout, replica: int
    ) -> None:
        self._ends, self._buffers = Ends(device), buffers
        self._rank, self._layout, self._replica = rank, layout, replica
        self._destinations: dict[tuple[int, ...], Layout] = {}  # of the replicas that met last

    def receive(self, shares: Sequence[Share], version: int, route: Route) -> dict[str, float]:
        """Receive this rank's part of a version; how it came. Raises GroupError where another rank did not get
        through."""
        assert route.meeting is not None
        ranks, replicas = self._layout.ranks, route.meeting.targets
        if replicas not in self._destinations:
            self._destinations = {replicas: Layout(self._layout.tensors, list(ranks) * len(replicas))}
        destination = self._destinations[replicas]
        return _carried(
            self._ends, shares, version, route, destination, receives=True, buffers=self._buffers,
            number=replicas.index(self._replica) * len(ranks) + self._rank,
        )  # fmt: skip

    def close(self) -> None:
        """Leave the meeting."""
        self._ends.close()


def peer_lost(what: object) -> PeerLost:
    """The error of a worker whose version did not get through."""
    return PeerLost(
        Problem(
            where="refit",
            what=f"a version did not get through to all workers: {what}",
            why="both sides carry it together, and none of them died",
            fix="resume from the last checkpoint; if it comes again, mend the network, or another transport of Refit",
        )
    )


def _carried(
    ends: Ends, shares: Sequence[Share], version: int, route: Route, destination: Layout | None, *, number: int,
    receives: bool, buffers: Mapping[str, torch.Tensor],
) -> dict[str, float]:  # fmt: skip
    assert route.meeting is not None
    marks = tuple(share.memory.mark for share in shares if isinstance(share.memory, Kept))
    part = Part(number=number, receives=receives, buffers=buffers, marks=marks)
    meeting = route.meeting
    spot = Spot(meeting.host, meeting.port, meeting.name, meeting.deadline_s)
    return ends.carry(route.transport, spot, layout_of(shares), destination, part, version)
