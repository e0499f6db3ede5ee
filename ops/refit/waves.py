"""Plans which rank sends a version to which, in waves: a receiver that has all of it forwards it in the next wave.

    waves({1: 0, 2: 0, 3: 0}, State())             # one sender, three receivers that hold equal boxes
    [[[1, TRAINER]], [[2, TRAINER], [3, 1]]]       # [receiver, source], wave by wave

Ranks are numbered as in a group: senders come first. All senders together are one source, the trainer. In each wave it
sends to one receiver of each kind, and a receiver that has the version sends to one receiver of its kind. So n
receivers of a kind have it after ceil(log2(n + 1)) waves, and in each wave a sender sends at most what it holds for one
receiver of each kind. Plans and their inputs are JSON-safe. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ops.refit.layout import Layout
from ops.refit.plan import Copy, build

TRAINER = -1  # as a source

Wave = list[list[int]]  # [receiver, source] each
Pair = tuple[int, int]  # sender, receiver


class State(msgspec.Struct, frozen=True):
    """What all ranks know about a version before a wave: receivers that have it, ranks that dropped out, and (receiver,
    source) pairs whose transfer failed. `refused` is the reason why no rank continues."""

    holders: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    failed: tuple[tuple[int, int], ...] = ()
    refused: str = ""


class RankReport(msgspec.Struct, frozen=True):
    """The report of the rank `by` about a rank. About itself: whether it has the version, and which ranks it could not
    get it from. About another rank: that it is gone. `plan` identifies the inputs of its plan."""

    by: int
    holds: bool = False
    lost: tuple[int, ...] = ()
    plan: str = ""


class NoSourceError(ValueError):
    """A receiver lacks a version and no rank is left to send it."""


def kinds(layout: Layout) -> list[int]:
    """Return, for each rank, the first rank that holds the same boxes: each can get a version from the other."""
    first: dict[frozenset[object], int] = {}
    held = [frozenset((place.tensor, place.box) for place in places) for places in layout.ranks]
    return [first.setdefault(boxes, rank) for rank, boxes in enumerate(held)]


def waves(kind: Mapping[int, int], state: State, trainer: Collection[int] | None = None) -> list[Wave]:
    """Return the waves after which every receiver that is not gone has the version. `kind` maps receivers to kinds;
    `trainer` lists the kinds that the trainer can send, by default all.

    Receivers choose in order; each starts looking for a free source at a different place. Raises NoSourceError, naming
    the receivers that no rank can send it to.
    """
    lacking = [rank for rank in sorted(kind) if rank not in state.holders and rank not in state.gone]
    sources: dict[int, list[int]] = {
        each: [TRAINER] if trainer is None or each in trainer else [] for each in kind.values()
    }
    for rank in sorted(set(state.holders) - set(state.gone)):
        sources[kind[rank]].append(rank)
    failed = set(state.failed)
    made: list[Wave] = []
    while lacking:
        free = {each: list(ranks) for each, ranks in sources.items()}
        wave: Wave = []
        for rank in lacking:
            if open_to := [source for source in free[kind[rank]] if (rank, source) not in failed]:
                wave.append([rank, open_to[rank % len(open_to)]])
                free[kind[rank]].remove(wave[-1][1])
        if not wave:
            raise NoSourceError(_refusal(lacking, state))
        for rank, _ in wave:
            sources[kind[rank]].append(rank)
            lacking.remove(rank)
        made.append(wave)
    return made


def gives(source: Layout, destination: Layout, kind: Mapping[int, int]) -> list[int]:
    """Return the kinds that the trainer can send with its remaining places."""
    found = []
    for each in sorted(set(kind.values())):
        try:
            build(source, _of(destination, [each], len(source.ranks)))
        except ValueError:
            continue
        found.append(each)
    return found


def parts(wave: Wave, source: Layout, destination: Layout, rank: int, segment_bytes: int) -> dict[Pair, list[Copy]]:
    """Return the copies that a rank sends and receives in a wave, by (sender, receiver). From the trainer: by the plan
    for all its receivers, which balances the load over its ranks. From a receiver: everything that it holds."""
    senders = len(source.ranks)
    found: dict[Pair, list[Copy]] = {}
    direct = [receiver for receiver, giver in wave if giver == TRAINER]
    if rank < senders or rank in direct:
        plan = build(source, _of(destination, direct, senders), segment_bytes=segment_bytes)
        for number, receiver in enumerate(direct):
            for copy in plan.copies(number) if rank < senders or rank == receiver else ():
                if rank in (copy.source, receiver):
                    found.setdefault((copy.source, receiver), []).append(copy)
    for receiver, giver in wave:
        if giver != TRAINER and rank in (giver, receiver):
            ends = [_of(destination, [end], senders) for end in (giver, receiver)]
            found[giver, receiver] = build(*ends, segment_bytes=segment_bytes).copies(0)
    return found


def settled(state: State, expected: Collection[int], reports: Mapping[int, RankReport], senders: int) -> State:
    """Return the state after a wave, or after a roll call, of the `expected` ranks. A rank that did not report itself
    is gone; a failed transfer between two live ranks is not retried."""
    there = {rank for rank in expected if rank in reports and reports[rank].by == rank}
    if len(plans := {reports[rank].plan for rank in there}) > 1:
        by_plan = [sorted(rank for rank in there if reports[rank].plan == plan) for plan in sorted(plans)]
        return msgspec.structs.replace(
            state,
            refused=f"refit, ranks {' and '.join(map(str, sorted(by_plan)))}: they plan from different layouts or "
            "versions; all ranks must use the same. Fix: the same model, layouts and version on all ranks",
        )
    gone = set(state.gone) | (set(expected) - there)
    holders = (set(state.holders) | {rank for rank in there if reports[rank].holds}) - gone
    failed = {
        (rank, TRAINER if peer < senders else peer) for rank in there for peer in reports[rank].lost if peer not in gone
    }
    return State(tuple(sorted(holders)), tuple(sorted(gone)), tuple(sorted(failed | set(state.failed))))


def _of(destination: Layout, ranks: list[int], senders: int) -> Layout:
    return Layout(destination.tensors, [destination.ranks[rank - senders] for rank in ranks])


def _refusal(lacking: list[int], state: State) -> str:
    apart = ", ".join(f"{rank} from {'the trainer' if source == TRAINER else source}" for rank, source in state.failed)
    return (
        f"refit, ranks {lacking}: no rank is left to send them the version (gone: {list(state.gone) or 'none'}; failed "
        f"transfers: {apart or 'none'}); only a rank that holds exactly this version can forward it. Fix: restart the "
        "ranks that are gone and refit from the trainer; live ranks with failed transfers need a network between them"
    )
