"""One rank of a refit's source, used by trainers: offers its part of a version, or sends it if both sides carry.

source = Source(device, rank, tensors, places, parameters)
share = source.share(parameters, TRANSPORTS["gloo"])       # for each version
source.carry(shares_of_all_ranks, version, route)          # if both sides carry
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ops.comm.stateless_group import GroupError
from ops.refit.layout import Place, Tensor
from ops.refit.memory import Mark
from ops.refit.share import Share, Shares, layout_of
from ops.refit.transports import Sender, Transport
from ops.refit.transports.meeting import Meeting
from pipeline.errors import PeerLost, Problem
from stages.backends.interface import Route


class Source:
    """The `rank`-th worker of its group, with its parameters of a model."""

    def __init__(
        self, device: torch.device, rank: int, tensors: Mapping[str, Tensor], places: Sequence[Place],
        parameters: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        self._rank = rank
        self._shares = Shares(tensors, places, parameters)
        self._senders: dict[str, Sender] = {}  # by the transport's name
        self._meetings: dict[str, Meeting] = {}
        self._device = device

    def share(self, parameters: Mapping[str, torch.Tensor], transport: Transport) -> Share:
        """Publish the current values of contiguous parameters, as this transport offers them."""
        if transport.both_carry:
            return self._shares.publish(parameters, lambda memory: memory.mark)
        return self._shares.publish(parameters, self._sender(transport).offer)

    def carry(self, shares: Sequence[Share], version: int, route: Route) -> None:
        """Send this rank's part of a version. `shares` are those of all source ranks. Raises PeerLost if another worker
        failed."""
        name, sender = route.transport.name, self._sender(route.transport)
        marks = marks_of(shares)
        meeting = self._meetings.get(name) or Meeting(self._device, self._rank, receives=False, where=route.meeting)
        self._meetings[name] = meeting = meeting.at(route.meeting, self._rank)
        buffers = {"": self._shares.memory(marks[self._rank])}
        try:
            meeting.carry(
                version, layout_of(shares), None, buffers, lambda: sender.send(meeting, version),
                marks=tuple(mark.mark for mark in marks),
            )  # fmt: skip
        except GroupError as error:
            raise peer_lost(error) from error

    def _sender(self, transport: Transport) -> Sender:
        if transport.name not in self._senders:
            self._senders[transport.name] = transport.sender()
        return self._senders[transport.name]


def marks_of(shares: Sequence[Share]) -> list[Mark]:
    """The mark of the memory that each source rank sends from."""
    return [share.memory for share in shares if isinstance(share.memory, Mark)]


def peer_lost(what: object) -> PeerLost:
    """The error for a version that did not reach all workers."""
    return PeerLost(
        Problem(
            where="refit",
            what=f"a version did not reach all workers: {what}",
            why="both sides transfer it together, and no worker died",
            fix="resume from the last checkpoint; if it happens again, repair the network or choose another transport",
        )
    )
