"""One rank of a refit's source, used by trainers: offers its part of a version, or sends it if both sides carry.

source = Source(device, rank, tensors, places, parameters)
share = source.share(parameters, TRANSPORTS["gloo"])       # for each version
source.carry(shares_of_all_ranks, version, route)          # if both sides carry
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ops.comm.stateless_group import GroupError
from ops.refit.layout import Place, Tensor
from ops.refit.ledger import Ledger
from ops.refit.memory import Mark
from ops.refit.share import Lent, Share, Shares, layout_of
from ops.refit.transports import Sender, Transport
from ops.refit.transports.meeting import Meeting
from pipeline import StageError
from pipeline.errors import PeerLost, Problem
from stages.backends.interface import Route
from stages.backends.refit.quantizer import Quantizer, Reduce


class Source:
    """The `rank`-th worker of its group, with its parameters of a model. With `quantize`, which combines a tensor over
    all ranks of the group, it offers the quantized model."""

    def __init__(
        self, device: torch.device, rank: int, tensors: Mapping[str, Tensor], places: Sequence[Place],
        parameters: Mapping[str, torch.Tensor], *, quantize: Reduce | None = None,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._ledger = Ledger(device)
        self._quantizer: Quantizer | None = None
        if quantize is not None:
            with self._ledger.counting():
                self._quantizer = quantizer = Quantizer(tensors, places, parameters, self._ledger, quantize)
                tensors, places = quantizer.tensors, quantizer.places
                parameters = quantizer.buffers(parameters)
        self._make = lambda: Shares(tensors, places, parameters, self._ledger)
        self._copied: Shares | None = None
        self._lent = Lent(tensors, places)
        self._fresh: Share | None = None  # offered in place, and not yet carried
        self._senders: dict[str, Sender] = {}  # by the transport's name
        self._meetings: dict[str, Meeting] = {}
        self._device = device

    def share(self, parameters: Mapping[str, torch.Tensor], transport: Transport) -> Share:
        """Publish the current values of contiguous parameters, as this transport offers them. The share's record has
        the memory of this rank, unless `carry` follows, which returns it; and the errors of quantized layers."""
        self._ledger.begin()
        if self._quantizer is None:
            return self._offered(parameters, transport)
        with self._ledger.counting():
            parameters = self._quantizer.filled(parameters)
        share = self._offered(parameters, transport)
        return replace(share, record={**share.record, **self._quantizer.record})

    def _offered(self, parameters: Mapping[str, torch.Tensor], transport: Transport) -> Share:
        with self._ledger.counting():
            if not transport.keep_copy:
                return self._in_place(parameters)
            if transport.both_carry:
                return self._shares().publish(parameters, lambda memory: memory.mark)
            share = self._shares().publish(parameters, self._sender(transport).offer)
        if isinstance(share.memory, np.ndarray):
            self._ledger.briefly(share.memory.nbytes)  # until the message has left
        return replace(share, record=self._ledger.record("source"))

    def carry(self, shares: Sequence[Share], version: int, route: Route) -> Mapping[str, float]:
        """Send this rank's part of a version. `shares` are those of all source ranks. Returns the memory of this rank,
        as metrics. Raises PeerLost if another worker failed."""
        name, sender = route.transport.name, self._sender(route.transport)
        marks = marks_of(shares)
        meeting = self._meetings.get(name) or self._meeting(route)
        self._meetings[name] = meeting = meeting.at(route.meeting, self._rank)
        lends = not route.transport.keep_copy
        if lends:
            self._check_unchanged(shares[self._rank], version, name)
        buffers = (self._lent if lends else self._shares()).buffers(marks[self._rank])
        try:
            with self._ledger.counting():
                meeting.carry(
                    version, layout_of(shares), None, buffers, lambda: sender.send(meeting, version),
                    marks=tuple(mark.mark for mark in marks),
                )  # fmt: skip
        except GroupError as error:
            raise peer_lost(error) from error
        return self._ledger.record("source")

    def _shares(self) -> Shares:
        """The copies of the parameters, allocated by the first transport that needs them."""
        self._copied = self._copied or self._make()
        return self._copied

    def _in_place(self, parameters: Mapping[str, torch.Tensor]) -> Share:
        try:
            self._fresh = self._lent.publish(parameters)
        except ValueError as error:
            raise StageError(_converted(str(error))) from error
        return self._fresh

    def _check_unchanged(self, share: Share, version: int, transport: str) -> None:
        """Raise StageError if the parameters are no longer those of a share that is carried again."""
        fresh, self._fresh = self._fresh, None
        if (fresh is None or fresh.summed != share.summed) and self._lent.summed() != share.summed:
            raise StageError(_changed(version, transport))

    def _meeting(self, route: Route) -> Meeting:
        return Meeting(self._device, self._rank, receives=False, where=route.meeting, ledger=self._ledger)

    def _sender(self, transport: Transport) -> Sender:
        if transport.name not in self._senders:
            self._senders[transport.name] = transport.sender()
        return self._senders[transport.name]


def _changed(version: int, transport: str) -> Problem:
    return Problem(
        where="refit",
        what=f"a restarted sampler needs version {version} again, and the trainer has changed its weights since",
        why=f"the transport {transport!r} has keep_copy=False, so the trainer has only its current weights",
        fix="resume the run; with keep_copy=True the run continues",
    )


def _converted(what: str) -> Problem:
    return Problem(
        where="refit",
        what=f"keep_copy=False, and parameter {what}",
        why="a parameter that is converted for the sampler needs a copy",
        fix="keep_copy=True",
    )


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
            fix="resume the run; if it happens again, repair the network or choose another transport",
        )
    )
