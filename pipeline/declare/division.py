"""Divides one minibatch over ranks and into the passes of each: the three ways that a user can choose. Arithmetic only.

parts, shared = divided_over(batch, range(32), ranks=4, microbatching=Packed(16384), equal=True)
parts[rank][i]                                               # positions in the batch: the samples of one pass
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from pipeline.declare.bundles import shared_rows
from pipeline.declare.lengths import Lengths
from pipeline.declare.partition import exchanged, rows_within, spread


@dataclass(frozen=True)
class Plain:
    """Runs of `samples` samples, padded to one rectangle; 0 means all of the rank's samples of a minibatch."""

    samples: int = 0


@dataclass(frozen=True)
class Dynamic:
    """Microbatches of samples of similar length (prompt and response together), of at most `tokens` tokens each,
    padding included."""

    tokens: int


@dataclass(frozen=True)
class Packed:
    """Samples concatenated in rows of at most `tokens` tokens, without padding. One row is a microbatch.

    shared  compute the prompt of a group once per row, where the backend can and the batch becomes cheaper by it;
            False never does
    """

    tokens: int
    shared: bool = field(default=True, repr=False)


Microbatching: TypeAlias = Plain | Dynamic | Packed
Parts: TypeAlias = list[list[list[int]]]  # one minibatch: [rank][microbatch][position in the batch]
_PASS = 1 / 16  # fixed cost of a pass (launches, partly filled kernels) as a fraction of a full one's tokens
_PAYS = 1 / 20  # the fraction of the cost that shared prompts must spare, since they copy keys and values


def divided_over(
    batch: Lengths, members: Sequence[int], ranks: int, microbatching: Microbatching, equal: bool, floor: float = 0.0
) -> tuple[Parts, bool]:
    """Return the microbatches of one minibatch on every rank, and whether their samples share prompts.

    They do if the slowest rank then costs less by a twentieth, a pass counting as a sixteenth of a full one's tokens,
    and not more if a row counts as `floor` tokens at least. Raises ValueError if the ranks cannot have equal numbers of
    microbatches.
    """
    plain = _parts(batch, members, ranks, microbatching, equal)
    if not (isinstance(microbatching, Packed) and batch.can_share):
        return plain, False
    fixed = _PASS * microbatching.tokens

    def slowest(parts: Parts, cost: Callable[[Sequence[int]], float]) -> tuple[float, float]:
        """The cost of the slowest rank, with the floor and without."""
        costs = [[cost(row) + fixed for row in part] for part in parts]
        return max(sum(max(one, floor) for one in part) for part in costs), max(map(sum, costs))

    alone = slowest(plain, lambda row: sum(map(batch.cost.__getitem__, row)))
    ways = [_dealt(rows, batch.row_cost, ranks) for rows in shared_rows(batch, members, ranks, microbatching.tokens)]
    best = min(ways, key=lambda parts: slowest(parts, batch.row_cost), default=plain)
    launched, counted = slowest(best, batch.row_cost)
    gains = launched <= alone[0] and counted < (1 - _PAYS) * alone[1]
    return (best, True) if gains else (plain, False)


def _parts(batch: Lengths, members: Sequence[int], ranks: int, microbatching: Microbatching, equal: bool) -> Parts:
    """Return the microbatches of one minibatch on every rank."""
    if not equal and ranks > 1:
        return [_parts(batch, share, 1, microbatching, equal)[0] for share in _shares(batch, members, ranks)]
    match microbatching:
        case Plain():
            return _plain(batch, members, ranks, microbatching.samples)
        case Dynamic():
            return _dynamic(batch, members, ranks, microbatching)
        case Packed():
            return _packed(batch, members, ranks, microbatching)


def _shares(batch: Lengths, members: Sequence[int], ranks: int) -> list[list[int]]:
    """Return each rank's samples in canonical order, with counts that differ by at most one and similar costs."""
    by_cost = batch.descending(members, batch.cost)
    shares = spread(by_cost, [batch.cost[i] for i in by_cost], ranks)
    return [sorted(share) for share in exchanged(shares, batch.cost)]


def _plain(batch: Lengths, members: Sequence[int], ranks: int, samples: int) -> Parts:
    """Give each rank the same number of samples, in canonical order, cut into runs."""
    if len(members) % ranks:
        raise ValueError(f"{ranks} ranks do not divide a minibatch of {len(members)} samples")
    step = samples or len(members)
    return [[share[i : i + step] for i in range(0, len(share), step)] for share in _shares(batch, members, ranks)]


def _dynamic(batch: Lengths, members: Sequence[int], ranks: int, microbatching: Dynamic) -> Parts:
    """Sort samples by length, give each rank one sample of every block of neighbors, and cut between blocks.

    A last block that is not full joins the previous one.
    """
    order = batch.descending(members, batch.total)
    starts = range(0, max(len(order) // ranks, 1) * ranks, ranks)
    widths, rows = [batch.total[order[start]] for start in starts], [1] * len(starts)
    if len(order) % ranks:
        rows[-1] = 2
    if (edges := _cut(widths, rows, microbatching.tokens)) is None:
        raise ValueError(
            f"{microbatching}: {ranks} ranks do not divide {len(order)} samples, and two of {widths[-1]} tokens, the "
            "shortest ones, do not fit together"
        )
    shares = spread(order, [batch.cost[i] for i in order], ranks)
    return [[share[start:stop] for start, stop in pairwise(edges)] for share in shares]


def _cut(widths: Sequence[int], rows: Sequence[int], tokens: int) -> list[int] | None:
    """Return the edges of the cheapest microbatches, counted in samples of a rank's share.

    None if a block does not fit. A block has a width, descending, and adds `rows` rows to a microbatch of every rank. A
    microbatch costs its tokens, padding included, plus a fixed part, which is why it is not best to cut everywhere.
    """
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first n blocks: the cost, and where the last microbatch starts
    for stop in range(1, len(widths) + 1):
        held, found = 0, []
        for start in reversed(range(stop)):
            held += rows[start]
            if held * widths[start] > tokens:
                break
            found.append((best[start][0] + held * widths[start] + _PASS * tokens, start))
        if not found:
            return None
        best.append(min(found))
    edges = [len(widths)]
    while edges[-1]:
        edges.append(best[edges[-1]][1])
    return [*reversed(edges[1:]), sum(rows)]


def _packed(batch: Lengths, members: Sequence[int], ranks: int, microbatching: Packed) -> Parts:
    """Return rows within the budget, the same number on every rank; the i-th rows of all ranks cost about the same."""
    rows = rows_within(microbatching.tokens, members, batch.total, batch.cost, multiple=ranks)
    if len(rows) % ranks:
        raise ValueError(
            f"{microbatching}: {len(members)} samples take {len(rows)} rows, and {ranks} ranks need a multiple of "
            f"{ranks}, none empty"
        )
    return _dealt(rows, lambda row: sum(map(batch.cost.__getitem__, row)), ranks)


def _dealt(rows: Sequence[list[int]], cost: Callable[[Sequence[int]], float], ranks: int) -> Parts:
    """Give each rank the same number of rows; `ranks` divide them."""
    costs = [cost(row) for row in rows]
    order = sorted(range(len(rows)), key=costs.__getitem__, reverse=True)
    return [[rows[i] for i in share] for share in spread(order, [costs[i] for i in order], ranks)]
