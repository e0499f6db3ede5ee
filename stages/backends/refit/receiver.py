"""The receiving end of a refit: what a sampler's rank does with the shares of all trainer ranks, and how it is checked.

    receiver = Receiver(tensors, places_of_a_replicas_ranks, rank, parameters)
    received = receiver.receive(shares, version, Route("pull"))   # in place
    sha256 = acknowledged(shares, [received.summed, ...])      # of the ranks that hold one copy together

Knows places and memory; it does not know engines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ops.refit.layout import Layout, Place, Tensor
from ops.refit.move import flat
from ops.refit.share import Share, digest_of, layout_of
from ops.refit.sums import Summed, Sums, digest
from ops.refit.transports.golden import Golden
from ops.refit.transports.pull import Pull
from pipeline import StageError
from pipeline.errors import Problem
from stages.backends.interface import Route
from stages.backends.refit.ends import Together


@dataclass(frozen=True)
class Received:
    """What came of a version on one rank: checksums of all that it holds; and bytes, what was not there from the
    version before (`lookups`: plans, tables, memory, connections), and the milliseconds of each part."""

    summed: Summed
    record: dict[str, float]


class NotAsOfferedError(StageError):
    """What is served is not what was offered."""


class Receiver:
    """One rank of a replica, which is one of `replicas` that hold the model alike. `ranks` are the places of a
    replica's ranks, `held` this one's tensors by the buffers of its places: contiguous, and where they are for good."""

    def __init__(
        self, tensors: Mapping[str, Tensor], ranks: Sequence[Sequence[Place]], rank: int,
        held: Mapping[str, torch.Tensor], *, replica: int = 0, replicas: int = 1,
    ) -> None:  # fmt: skip
        buffers = {name: flat(tensor) for name, tensor in held.items()}
        device = next(iter(held.values())).device
        layout, number = Layout(tensors, list(ranks) * replicas), replica * len(ranks) + rank
        self._tensors = tensors
        self._checked: Layout | None = None
        self._pull = Pull(layout, number, buffers, device)
        self._golden = Golden(layout, number, buffers)
        self._together = Together(device, buffers, rank, Layout(tensors, ranks), replica)
        self._sums = Sums(tensors, ranks[rank], buffers.__getitem__)

    def receive(self, shares: Sequence[Share], version: int, route: Route) -> Received:
        """Write this rank's part of the version, and add up what is there then.

        Raises StageError, before a byte is written, where the model that is offered is another one; GroupError where
        another rank did not get through.
        """
        if (layout := layout_of(shares)) is not self._checked:
            check_same(self._tensors, layout.tensors)
            self._checked = layout
        if route.meeting is not None:
            record = self._together.receive(shares, version, route)
        else:
            record = self._taken(shares, golden=route.transport == "golden")
        begun_s = time.perf_counter()
        summed = self._sums.now()
        record["check_ms"] = 1e3 * (time.perf_counter() - begun_s)
        return Received(summed, record)

    def close(self) -> None:
        """Give opened memory back, and leave meetings."""
        self._pull.close()
        self._together.close()

    def _taken(self, shares: Sequence[Share], *, golden: bool) -> dict[str, float]:
        """What needs no sender."""
        known, begun_s = self._pull.lookups, time.perf_counter()
        moved_bytes = (self._golden if golden else self._pull).run(shares)
        return {
            "received_bytes": float(moved_bytes),
            "lookups": float(self._pull.lookups - known),
            "move_ms": 1e3 * (time.perf_counter() - begun_s),
        }


def check_same(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise StageError naming the first tensor that differs."""
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise StageError(
                Problem(
                    where=f"weight {name!r}",
                    what=f"this model has {_shown(wanted.get(name))} and is given {_shown(given.get(name))}",
                    why="weights are loaded only into the same architecture and dtype",
                    fix="the same Model on both sides, on the same kind of device",
                )
            )


def slowest(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One record for several ranks: bytes together, and the largest of everything else."""
    names = {name for record in records for name in record}
    join = {name: sum if name.endswith("_bytes") else max for name in names}
    return {name: join[name](record.get(name, 0.0) for record in records) for name in sorted(names)}


def acknowledged(shares: Sequence[Share], ranks: Sequence[Summed], offered: str = "") -> str:
    """The hash of what the ranks of one copy hold; `offered` is that of the shares, where it is known already. Raises
    NotAsOfferedError where they differ."""
    offered = offered or digest_of(shares)
    try:
        found = digest(layout_of(shares).tensors, ranks)
    except ValueError as error:
        raise NotAsOfferedError(_broken(str(error))) from error
    if found != offered:
        raise NotAsOfferedError(_broken(f"offered were weights with sha256 {offered[:12]}, served are {found[:12]}"))
    return found


def _shown(tensor: Tensor | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _broken(what: str) -> Problem:
    return Problem(
        where="refit",
        what=what,
        why="rollout must sample from exactly the weights that were trained",
        fix="resume from the last checkpoint; if it comes again, the transfer is broken",
    )
