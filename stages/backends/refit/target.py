"""One rank of a refit's target, used by samplers: receives a version from the shares of all source ranks and computes
the checksums of the result.

    target = Target(tensors, places_of_a_replicas_ranks, rank, parameters)
    received = target.receive(shares, version, PULL)           # in place
    sha256 = acknowledged(shares, [received.summed, ...])      # over the ranks of one copy

Knows places and memory, not engines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ops.refit.layout import Layout, Place, Tensor
from ops.refit.ledger import Ledger
from ops.refit.move import flat
from ops.refit.share import Share, digest_of, layout_of
from ops.refit.sums import Summed, Sums, digest
from ops.refit.transports import Receiver
from ops.refit.transports.meeting import Meeting
from pipeline import StageError
from pipeline.errors import Problem
from stages.backends.interface import Route
from stages.backends.refit.source import marks_of


@dataclass(frozen=True)
class Received:
    """The result of a version on one rank: checksums of everything it holds, and a record: bytes, `lookups` (plans,
    tables, memory and connections not reused from the previous version), milliseconds of each part, and the memory that
    the rank keeps and used."""

    summed: Summed
    record: dict[str, float]


class NotAsOfferedError(StageError):
    """The served weights differ from the offered ones."""


class Target:
    """One rank of one of `replicas` equal replicas. `ranks` are the places of a replica's ranks; `held` are this rank's
    tensors by buffer, contiguous and at fixed addresses. `ledger` counts the memory that the rank keeps for refits."""

    def __init__(
        self, tensors: Mapping[str, Tensor], ranks: Sequence[Sequence[Place]], rank: int,
        held: Mapping[str, torch.Tensor], *, replica: int = 0, replicas: int = 1, ledger: Ledger | None = None,
    ) -> None:  # fmt: skip
        buffers = {name: flat(tensor) for name, tensor in held.items()}
        self._device = next(iter(held.values())).device
        self._ledger = ledger or Ledger(self._device)
        self._buffers, self._tensors, self._ranks = buffers, tensors, ranks
        self._rank, self._replica, self._all = rank, replica, tuple(range(replicas))
        self._checked: Layout | None = None
        self._layouts: dict[tuple[int, ...], Layout] = {}  # by participating replicas
        self._receivers: dict[str, Receiver] = {}  # by the transport's name
        self._meetings: dict[str, Meeting] = {}
        with self._ledger.counting():
            self._sums = Sums(tensors, ranks[rank], buffers.__getitem__)

    def receive(self, shares: Sequence[Share], version: int, route: Route) -> Received:
        """Write this rank's part of the version and compute the checksums.

        Raises StageError, before writing a byte, if the offered model is a different one; GroupError if another rank
        failed.
        """
        self._ledger.begin()
        if (layout := layout_of(shares)) is not self._checked:
            check_same(self._tensors, layout.tensors)
            self._checked = layout
        name = route.transport.name
        if name not in self._receivers:
            self._receivers[name] = route.transport.receiver()
        receiver, (destination, meeting) = self._receivers[name], self._met(name, route)
        marks = tuple(mark.mark for mark in marks_of(shares)) if route.meeting is not None else ()
        with self._ledger.counting():
            record = meeting.carry(
                version, layout, destination, self._buffers, lambda: receiver.receive(meeting, shares, version),
                marks=marks,
            )  # fmt: skip
            begun_s = time.perf_counter()
            summed = self._sums.now()
        record["check_ms"] = 1e3 * (time.perf_counter() - begun_s)
        return Received(summed, record | self._ledger.record("target"))

    def close(self) -> None:
        """Release opened memory and leave meetings."""
        for receiver in self._receivers.values():
            receiver.close()
        for meeting in self._meetings.values():
            meeting.leave()

    def _met(self, name: str, route: Route) -> tuple[Layout, Meeting]:
        """The layout of all participating replicas, and this rank's meeting."""
        replicas = self._all if route.meeting is None else route.meeting.targets
        if replicas not in self._layouts:
            self._layouts = {replicas: Layout(self._tensors, list(self._ranks) * len(replicas))}
        number = replicas.index(self._replica) * len(self._ranks) + self._rank
        meeting = self._meetings.get(name) or Meeting(
            self._device, number, receives=True, where=route.meeting, ledger=self._ledger
        )
        self._meetings[name] = meeting = meeting.at(route.meeting, number)
        return self._layouts[replicas], meeting


def check_same(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise StageError naming the first tensor that differs."""
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise StageError(
                Problem(
                    where=f"weight {name!r}",
                    what=f"this model has {_shown(wanted.get(name))} and receives {_shown(given.get(name))}",
                    why="weights only load into the same architecture and dtype",
                    fix="the same Model on both sides, on the same kind of device",
                )
            )


def slowest(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One record for several ranks: the sum of bytes, and the maximum of everything else."""
    names = {name for record in records for name in record}
    join = {name: sum if name.endswith("_bytes") else max for name in names}
    return {name: join[name](record.get(name, 0.0) for record in records) for name in sorted(names)}


def acknowledged(shares: Sequence[Share], ranks: Sequence[Summed], offered: str = "") -> str:
    """The hash of the weights that the ranks of one copy hold; `offered` is the hash of the shares, if already known.
    Raises NotAsOfferedError if they differ."""
    offered = offered or digest_of(shares)
    if len(shares) == 1 and all(rank == shares[0].summed for rank in ranks):
        return offered  # each holds the very boxes that were offered
    try:
        found = digest(layout_of(shares).tensors, ranks)
    except ValueError as error:
        raise NotAsOfferedError(_broken(str(error))) from error
    if found != offered:
        raise NotAsOfferedError(_broken(f"offered weights have sha256 {offered[:12]}, served weights {found[:12]}"))
    return found


def _shown(tensor: Tensor | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _broken(what: str) -> Problem:
    return Problem(
        where="refit",
        what=what,
        why="rollout must sample from exactly the weights that were trained",
        fix="resume the run; if it happens again, the transfer is broken",
    )
