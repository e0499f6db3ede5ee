"""Balanced packing and sharding of a batch over data-parallel ranks: arithmetic on lengths. Knows no tensor.

The driver computes it once per task; the result travels in the `extra_info` of the handle, and ranks follow it. If each
rank packed on its own, they would run different numbers of collectives and hang.

    shards = shard_batch(prompts=[12, 12, 9, 9], responses=[40, 7, 33, 21], ranks=2, microbatching=Packed(64))
    check_equal(shards)                                       # preflight check: same counts, same pad lengths
    mine = shards[rank]
    handle.reorder(mine.index)                                # the rows of this rank
    [mine.updates[0].microbatches[i].samples for i in ...]    # positions in those rows
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, TypeAlias

import msgspec

from pipeline.declare.partition import exchanged, rows_within, spread


@dataclass(frozen=True)
class Plain:
    """Runs of `samples` samples, padded to one rectangle; 0 means all of the rank's samples of a minibatch."""

    samples: int = 0


@dataclass(frozen=True)
class Dynamic:
    """Microbatches of samples of similar length, of at most `tokens` tokens each, padding included."""

    tokens: int


@dataclass(frozen=True)
class Packed:
    """Samples concatenated in rows of at most `tokens` tokens, without padding. One row is a microbatch."""

    tokens: int


Microbatching: TypeAlias = Plain | Dynamic | Packed
_Parts: TypeAlias = list[list[list[int]]]  # one minibatch: [rank][microbatch][position in the batch]


class Microbatch(msgspec.Struct, frozen=True, array_like=True):
    """The input of one pass: positions in the shard, ascending, and the lengths to pad to, in tokens."""

    samples: tuple[int, ...]
    prompt: int
    response: int


class Update(msgspec.Struct, frozen=True, array_like=True):
    """One minibatch on one rank. `tokens` (of responses) and `samples` count all ranks; they normalize the loss."""

    microbatches: tuple[Microbatch, ...]
    tokens: int
    samples: int


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """The share of one rank out of `ranks`. `index` holds positions in the batch, ascending (canonical order)."""

    rank: int
    ranks: int
    index: tuple[int, ...]
    updates: tuple[Update, ...]
    packed: bool


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage's batch is divided over the ranks of its worker group, as plain values in the plan.

    mode, size    of the microbatching: "plain" and samples, "dynamic" or "packed" and tokens
    minibatches   equal runs of groups, one optimizer update each
    equal         whether every rank has the same number of microbatches; required if the ranks run collectives
    lengths       the ragged dimensions of prompt and response
    """

    mode: Literal["plain", "dynamic", "packed"] = "plain"
    size: int = 0
    minibatches: int = 1
    equal: bool = True
    lengths: tuple[str, str] = ("P", "T")

    @staticmethod
    def of(microbatching: Microbatching, *, minibatches: int = 1, equal: bool = True) -> Sharding:
        """Build from the user's settings."""
        mode: Any = type(microbatching).__name__.lower()
        size = microbatching.samples if isinstance(microbatching, Plain) else microbatching.tokens
        return Sharding(mode=mode, size=size, minibatches=minibatches, equal=equal)

    def shards(self, lengths: Mapping[str, Sequence[int]], ranks: int) -> list[Shard]:
        """Return one shard per rank for samples of these lengths. Raises ValueError as `shard_batch` does."""
        kinds = {"plain": Plain, "dynamic": Dynamic, "packed": Packed}
        prompts, responses = (lengths[dim] for dim in self.lengths)
        made = shard_batch(
            prompts,
            responses,
            ranks=ranks,
            microbatching=kinds[self.mode](self.size),
            minibatches=self.minibatches,
            equal=self.equal,
        )
        if self.equal:
            check_equal(made)
        return made


def shard_batch(
    prompts: Sequence[int],
    responses: Sequence[int],
    *,
    ranks: int,
    microbatching: Microbatching,
    minibatches: int = 1,
    equal: bool = True,
    quadratic: float = 0.0,
) -> list[Shard]:
    """Return one shard per rank, from the prompt and response lengths of all samples, in tokens, in canonical order.

    minibatches  equal runs of samples; which samples an update sees does not depend on `ranks`
    equal        every rank has the same number of microbatches in every update, none of them empty, and the i-th ones
                 of all ranks have the same pad lengths. Without it, each rank packs its share alone, which is allowed
                 only for stages without collectives between ranks
    quadratic    a sample of n tokens costs n + quadratic * n^2, and ranks are balanced by cost; 0 balances tokens

    With one rank, Plain returns runs of samples in canonical order. All microbatches of Plain have the same pad
    lengths. A Packed row is not padded; its pad lengths are those of the rectangles that its results are unpacked into.

    Raises ValueError if no plan exists. One always exists if the ranks divide a minibatch and the longest prompt plus
    the longest response fit the budget.
    """
    batch = _Lengths(list(map(int, prompts)), list(map(int, responses)), quadratic)
    _check_arguments(batch, ranks, microbatching, minibatches)
    size = len(batch) // minibatches
    parts = [
        _parts(batch, range(start, start + size), ranks, microbatching, equal) for start in range(0, len(batch), size)
    ]
    pads = [_pads(batch, part, microbatching, equal) for part in parts]
    tokens = [sum(batch.responses[start : start + size]) for start in range(0, len(batch), size)]
    shards = []
    for rank in range(ranks):
        index = sorted(chain.from_iterable(chain.from_iterable(part[rank] for part in parts)))
        place = {position: i for i, position in enumerate(index)}
        updates = tuple(
            Update(
                tuple(
                    Microbatch(tuple(sorted(place[position] for position in samples)), *pad)
                    for samples, pad in zip(part[rank], pads_of[rank])
                ),
                count,
                size,
            )
            for part, pads_of, count in zip(parts, pads, tokens)
        )
        shards.append(Shard(rank, ranks, tuple(index), updates, isinstance(microbatching, Packed)))
    return shards


def check_equal(shards: Sequence[Shard]) -> None:
    """Raise ValueError, naming ranks and numbers, if the ranks differ in their microbatch counts or shapes."""
    for other in shards[1:]:
        first = shards[0]
        ranks = f"ranks {first.rank} and {other.rank}"
        if len(first.updates) != len(other.updates):
            raise ValueError(f"{ranks} have {len(first.updates)} and {len(other.updates)} updates")
        for number, (one, two) in enumerate(zip(first.updates, other.updates)):
            counts = len(one.microbatches), len(two.microbatches)
            if counts[0] != counts[1]:
                raise ValueError(f"{ranks} have {counts[0]} and {counts[1]} microbatches in update {number}")
            if (one.tokens, one.samples) != (two.tokens, two.samples):
                raise ValueError(
                    f"{ranks} normalize update {number} by {one.tokens} and {two.tokens} tokens, "
                    f"{one.samples} and {two.samples} samples"
                )
            for i, (a, b) in enumerate(zip(one.microbatches, two.microbatches)):
                if (a.prompt, a.response) != (b.prompt, b.response):
                    raise ValueError(
                        f"{ranks} pad microbatch {i} of update {number} to {a.prompt} + {a.response} and "
                        f"{b.prompt} + {b.response} tokens"
                    )


def waste(shards: Sequence[Shard], prompts: Sequence[int], responses: Sequence[int]) -> float:
    """Return the fraction of all computed tokens that is padding, over all ranks; 0 if rows are packed."""
    if any(shard.packed for shard in shards):
        return 0.0
    padded = sum(
        len(microbatch.samples) * (microbatch.prompt + microbatch.response)
        for shard in shards
        for update in shard.updates
        for microbatch in update.microbatches
    )
    return 1.0 - (sum(prompts) + sum(responses)) / padded if padded else 0.0


def balance(shards: Sequence[Shard], prompts: Sequence[int], responses: Sequence[int], quadratic: float = 0.0) -> float:
    """Return the cost of the busiest rank over the mean of all ranks, averaged over updates; 1 is perfect. Padding does
    not count."""
    cost = _Lengths(list(prompts), list(responses), quadratic).cost
    ratios = []
    for updates in zip(*(shard.updates for shard in shards)):
        loads = [
            sum(cost[shard.index[i]] for microbatch in update.microbatches for i in microbatch.samples)
            for shard, update in zip(shards, updates)
        ]
        ratios.append(max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0)
    return sum(ratios) / len(ratios)


class _Lengths:
    """The lengths of a batch in tokens, and the cost of each sample."""

    def __init__(self, prompts: list[int], responses: list[int], quadratic: float) -> None:
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} lengths of prompts for {len(responses)} of responses")
        if not (math.isfinite(quadratic) and quadratic >= 0):
            raise ValueError(f"quadratic={quadratic} is not a number of 0 or more")
        self.prompts, self.responses = prompts, responses
        self.total = [prompt + response for prompt, response in zip(prompts, responses)]
        self.cost = [n + quadratic * n * n for n in self.total] if quadratic else self.total

    def __len__(self) -> int:
        return len(self.total)

    def descending(self, positions: Sequence[int], by: Sequence[float]) -> list[int]:
        """Sort `positions` by descending `by`; equal ones stay in canonical order."""
        return sorted(positions, key=by.__getitem__, reverse=True)

    def shortest(self, positions: Sequence[int]) -> tuple[int, int]:
        """Return the lengths of the shortest prompt and the shortest response."""
        return min(map(self.prompts.__getitem__, positions)), min(map(self.responses.__getitem__, positions))

    def pad(self, positions: Sequence[int]) -> tuple[int, int]:
        """Return the lengths of the longest prompt and the longest response."""
        return max(map(self.prompts.__getitem__, positions)), max(map(self.responses.__getitem__, positions))


def _check_arguments(batch: _Lengths, ranks: int, microbatching: Microbatching, minibatches: int) -> None:
    """Check each argument by itself; each mode checks on its own whether the ranks must divide a minibatch."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks} is not 1 or more")
    if minibatches < 1 or len(batch) % minibatches:
        raise ValueError(f"{len(batch)} samples are not {minibatches} minibatches of equal size")
    if len(batch) // minibatches < ranks:
        raise ValueError(f"{len(batch) // minibatches} samples in a minibatch are fewer than the {ranks} ranks")
    for name, lengths in (("prompt", batch.prompts), ("response", batch.responses)):
        if min(lengths) < 0:
            position = lengths.index(min(lengths))
            raise ValueError(f"the {name} at position {position} has a length of {lengths[position]} tokens")
    if not isinstance(microbatching, Microbatching):
        raise ValueError(f"{microbatching!r} is not Plain(samples), Dynamic(tokens) or Packed(tokens)")
    number = microbatching.samples if isinstance(microbatching, Plain) else microbatching.tokens
    if not isinstance(number, int):
        raise ValueError(f"{microbatching}: {number!r} is not a whole number")
    if isinstance(microbatching, Plain):
        if microbatching.samples < 0:
            raise ValueError(f"{microbatching}: samples in a microbatch are 0 (the whole minibatch) or more")
        return
    if microbatching.tokens < 1:
        raise ValueError(f"{microbatching}: a budget is 1 token or more")
    if (longest := max(batch.total)) > microbatching.tokens:
        position = batch.total.index(longest)
        raise ValueError(
            f"{microbatching}: the sample at position {position} has {batch.prompts[position]} + "
            f"{batch.responses[position]} = {longest} tokens and does not fit"
        )


def _parts(batch: _Lengths, members: Sequence[int], ranks: int, microbatching: Microbatching, equal: bool) -> _Parts:
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


def _pads(batch: _Lengths, parts: _Parts, microbatching: Microbatching, equal: bool) -> list[list[tuple[int, int]]]:
    """Return the pad lengths, [rank][microbatch]."""
    if isinstance(microbatching, Plain):
        whole = max(batch.prompts), max(batch.responses)
        return [[whole] * len(part) for part in parts]
    if not equal:
        return [[batch.pad(samples) for samples in part] for part in parts]
    return [[batch.pad(list(chain.from_iterable(together))) for together in zip(*parts)]] * len(parts)


def _shares(batch: _Lengths, members: Sequence[int], ranks: int) -> list[list[int]]:
    """Return each rank's samples in canonical order, with counts that differ by at most one and similar costs."""
    by_cost = batch.descending(members, batch.cost)
    shares = spread(by_cost, [batch.cost[i] for i in by_cost], ranks)
    return [sorted(share) for share in exchanged(shares, batch.cost)]


def _plain(batch: _Lengths, members: Sequence[int], ranks: int, samples: int) -> _Parts:
    """Give each rank the same number of samples, in canonical order, cut into runs."""
    if len(members) % ranks:
        raise ValueError(f"{ranks} ranks do not divide a minibatch of {len(members)} samples")
    step = samples or len(members)
    return [[share[i : i + step] for i in range(0, len(share), step)] for share in _shares(batch, members, ranks)]


def _dynamic(batch: _Lengths, members: Sequence[int], ranks: int, microbatching: Dynamic) -> _Parts:
    """Sort samples by length, give each rank one sample of every block of neighbors, and cut where the budget is full.

    Of several orders, the one with the fewest microbatches, and then the least padding, is used.
    """
    best: tuple[tuple[int, int], list[int], list[int]] | None = None
    for order in _orders(batch, members, ranks * microbatching.tokens):
        blocks = _Blocks(batch, order, ranks)
        if (edges := blocks.cut(microbatching.tokens)) is None:
            continue
        score = len(edges), blocks.padded(edges)
        if best is None or score < best[0]:
            best = score, order, edges
    if best is None:
        prompt, response = batch.pad(members)
        rest = "" if len(members) % ranks == 0 else f", and {ranks} ranks do not divide {len(members)} samples"
        raise ValueError(
            f"{microbatching}: microbatches that {ranks} ranks pad to the same lengths do not fit; prompts reach "
            f"{prompt} and responses {response} tokens, together {prompt + response}{rest}"
        )
    _, order, edges = best
    shares = spread(order, [batch.cost[i] for i in order], ranks)
    return [[share[start:stop] for start, stop in pairwise(edges)] for share in shares]


def _orders(batch: _Lengths, members: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield orders in which neighbors have similar prompts and similar responses. `tokens` is the budget of all ranks
    together.

    Prompts and responses are padded separately, so sorting by one leaves the other ragged. Bands of the one that varies
    more, each sorted by the other, alternately up and down, keep both similar. The best number of bands depends on the
    lengths.
    """
    (low_p, low_r), (high_p, high_r) = batch.shortest(members), batch.pad(members)
    outer, inner = batch.responses, batch.prompts
    if high_p - low_p > high_r - low_r:
        outer, inner = inner, outer
    order = batch.descending(batch.descending(members, inner), outer)
    yield order
    total = sum(batch.total[i] for i in members)
    for microbatches in (2, 4, 8):  # in a band, about
        bands = total // (tokens * microbatches)
        if bands < 2:
            return
        cut: list[list[int]] = [[] for _ in range(bands)]
        passed = 0
        for i in order:
            cut[min(passed * bands // total, bands - 1)].append(i)
            passed += batch.total[i]
        yield [i for n, band in enumerate(cut) for i in sorted(band, key=inner.__getitem__, reverse=n % 2 == 0)]


class _Blocks:
    """Blocks of one sample per rank, sorted by length. A last block that is not full joins the previous one."""

    def __init__(self, batch: _Lengths, order: Sequence[int], ranks: int) -> None:
        self.ranks, self.samples = ranks, len(order)
        pads = [batch.pad(order[start : start + ranks]) for start in range(0, len(order), ranks)]
        self.prompts, self.responses = map(list, zip(*pads))
        self.rows = [1] * len(pads)  # how many rows each block adds to a microbatch of every rank
        if len(order) % ranks:
            (prompt, response), _ = pads[-1], (self.prompts.pop(), self.responses.pop(), self.rows.pop())
            self.prompts[-1], self.responses[-1] = max(self.prompts[-1], prompt), max(self.responses[-1], response)
            self.rows[-1] = 2

    def cut(self, tokens: int) -> list[int] | None:
        """Return the edges of the microbatches, as few as this order allows, counted in samples of a rank's share; None
        if a block does not fit."""
        edges, rows, prompt, response = [0], 0, 0, 0
        for number, (p, r, count) in enumerate(zip(self.prompts, self.responses, self.rows)):
            prompt, response = max(prompt, p), max(response, r)
            rows += count
            if rows * (prompt + response) > tokens:
                if count * (p + r) > tokens:
                    return None
                edges.append(number)
                rows, prompt, response = count, p, r
        return [*edges, sum(self.rows)]

    def padded(self, edges: Sequence[int]) -> int:
        """Return the number of tokens in all microbatches of all ranks, padding included."""
        total = 0
        for start, stop in pairwise(edges):
            count = min(stop * self.ranks, self.samples) - start * self.ranks
            total += count * (max(self.prompts[start:stop]) + max(self.responses[start:stop]))
        return total


def _packed(batch: _Lengths, members: Sequence[int], ranks: int, microbatching: Packed) -> _Parts:
    """Return rows within the budget, the same number on every rank; the i-th rows of all ranks cost about the same."""
    rows = rows_within(microbatching.tokens, members, batch.total, batch.cost, multiple=ranks)
    if len(rows) % ranks:
        raise ValueError(
            f"{microbatching}: {len(members)} samples take {len(rows)} rows, and {ranks} ranks need a multiple of "
            f"{ranks}, none empty"
        )
    costs = [sum(map(batch.cost.__getitem__, row)) for row in rows]
    order = sorted(range(len(rows)), key=costs.__getitem__, reverse=True)
    return [[rows[i] for i in share] for share in spread(order, [costs[i] for i in order], ranks)]
