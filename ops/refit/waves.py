"""Who gives a version to whom, in waves: who has all of it gives it on in the next one.

    waves({1: 0, 2: 0, 3: 0}, State())             # three receivers that hold equal boxes, behind one sender
    [[[1, TRAINER]], [[2, TRAINER], [3, 1]]]       # [receiver, source], wave by wave

Ranks are numbered as in a group: senders come first. The senders together are one source, the trainer, which gives to
one receiver of each kind in a wave; a receiver that has the version is one for receivers of its kind, one in a wave. So
n receivers of a kind have it after ceil(log2(n + 1)) waves, and no sender sends more than it holds for one receiver of
each kind in any of them. What is planned, and what it is planned from, is JSON-safe. Nothing here communicates.
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
    """What all ranks know of a version before a wave: receivers that have it, ranks that take no part any more, and
    (receiver, source) between which it did not get through. `refused` says why nobody goes on."""

    holders: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    failed: tuple[tuple[int, int], ...] = ()
    refused: str = ""


class Report(msgspec.Struct, frozen=True):
    """What `by` says of a rank: of itself, whether it has the version and which ranks it could not get it from; of
    another, that it is gone. `plan` says what it plans from."""

    by: int
    holds: bool = False
    lost: tuple[int, ...] = ()
    plan: str = ""


class NoSourceError(ValueError):
    """A receiver lacks a version that nobody is left to give it."""


def kinds(layout: Layout) -> list[int]:
    """For each rank, the first one that holds the same boxes: what the one has, the other may have of it."""
    first: dict[frozenset[object], int] = {}
    held = [frozenset((place.tensor, place.box) for place in places) for places in layout.ranks]
    return [first.setdefault(boxes, rank) for rank, boxes in enumerate(held)]


def waves(kind: Mapping[int, int], state: State, trainer: Collection[int] | None = None) -> list[Wave]:
    """The waves after which every receiver that is not gone has the version. `kind` is each receiver's; `trainer` the
    kinds that the trainer can give, by default all.

    Receivers take their turn in order, and begin to look for a source that is free at another place each. Raises
    NoSourceError, naming them, where receivers are left that nobody can give it.
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
    """The kinds that the trainer can give with the places that its ranks have left."""
    found = []
    for each in sorted(set(kind.values())):
        try:
            build(source, _of(destination, [each], len(source.ranks)))
        except ValueError:
            continue
        found.append(each)
    return found


def parts(wave: Wave, source: Layout, destination: Layout, rank: int, segment_bytes: int) -> dict[Pair, list[Copy]]:
    """What a rank sends and receives in a wave, by (sender, receiver): from the trainer by the plan for all those that
    it gives to, which divides them evenly among its ranks; from a receiver, all that it holds."""
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


def settled(state: State, expected: Collection[int], reports: Mapping[int, Report], senders: int) -> State:
    """The state behind a wave or a roll call of the `expected` ranks: who did not report itself is gone; what did not
    get through between two that are there is not tried again."""
    there = {rank for rank in expected if rank in reports and reports[rank].by == rank}
    if len(plans := {reports[rank].plan for rank in there}) > 1:
        by_plan = [sorted(rank for rank in there if reports[rank].plan == plan) for plan in sorted(plans)]
        return msgspec.structs.replace(
            state,
            refused=f"refit, ranks {' and '.join(map(str, sorted(by_plan)))}: they plan from different layouts, or "
            "another version; every rank has to know the same. Fix: the same model, layouts and version on all ranks",
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
        f"refit, ranks {lacking}: nobody is left to give them the version (gone: {list(state.gone) or 'none'}; did not "
        f"get it: {apart or 'none'}); only a rank that holds exactly this version may give it on. Fix: start what is "
        "gone again and refit from the trainer; ranks that are up but did not get it need a network between them"
    )
