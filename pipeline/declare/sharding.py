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

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from pipeline.declare.division import Dynamic, Microbatching, Packed, Parts, Plain, divided_over
from pipeline.declare.lengths import Lengths, spared

__all__ = [
    "Dynamic",
    "Microbatch",
    "Microbatching",
    "Packed",
    "Plain",
    "Shard",
    "Sharding",
    "Update",
    "balance",
    "check_equal",
    "saved",
    "shard_batch",
    "waste",
]


class Microbatch(msgspec.Struct, frozen=True, array_like=True):
    """The input of one pass: positions in the shard, ascending, and the shape of its rectangle, in tokens.

    A row has `prompt + response` tokens and holds one sample, prompt and response together. `response` is at least the
    longest response. A prompt may be longer than `prompt` if its response is shorter by as much.

    `shared` are the sizes of runs of samples that share a prompt, which the row computes once; empty if it computes the
    prompt of every sample. Computing all of them gives the same numbers.
    """

    samples: tuple[int, ...]
    prompt: int
    response: int
    shared: tuple[int, ...] = ()


class Update(msgspec.Struct, frozen=True, array_like=True):
    """One minibatch on one rank. `tokens` (of responses) and `samples` count all ranks; they normalize the loss."""

    microbatches: tuple[Microbatch, ...]
    tokens: int
    samples: int


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """The share of one rank out of `ranks`. `index` holds positions in the batch, ascending (canonical order).

    Of all ranks together: `padding`, the fraction of computed tokens that is padding, `imbalance`, the cost of the
    slowest rank over the mean, and `shared`, the fraction of the samples' tokens that is not computed, since samples
    share prompts; see `waste`, `balance` and `saved`.
    """

    rank: int
    ranks: int
    index: tuple[int, ...]
    updates: tuple[Update, ...]
    packed: bool
    padding: float = 0.0
    imbalance: float = 1.0
    shared: float = 0.0

    def spared(self, prompts: Sequence[int]) -> list[int]:
        """The lengths of the prompts that this rank does not compute again; `prompts` are those of its samples."""
        rows = [microbatch for update in self.updates for microbatch in update.microbatches]
        return [n for row in rows for n in spared([prompts[i] for i in row.samples], row.shared)]


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage's batch is divided over the ranks of its worker group, as plain values in the plan.

    mode, size    of the microbatching: "plain" and samples, "dynamic" or "packed" and tokens
    minibatches   equal runs of groups, one optimizer update each
    equal         whether every rank has the same number of microbatches; required if the ranks run collectives
    lengths       the ragged dimensions of prompt and response
    quadratic     attention's share of the cost: a sample of n tokens costs n + quadratic * n^2; 0 counts tokens only
    shares        whether packed rows may compute the prompt of a group once
    floor         tokens that a row costs at least, since a GPU waits for the host to launch its kernels
    """

    mode: Literal["plain", "dynamic", "packed"] = "plain"
    size: int = 0
    minibatches: int = 1
    equal: bool = True
    lengths: tuple[str, str] = ("P", "T")
    quadratic: float = 0.0
    shares: bool = False
    floor: float = 0.0

    @staticmethod
    def of(
        microbatching: Microbatching,
        *,
        minibatches: int = 1,
        equal: bool = True,
        quadratic: float = 0.0,
        shares: bool = False,
        floor: float = 0.0,
    ) -> Sharding:
        """Build from the user's settings. `shares` says whether the backend can share prompts."""
        mode: Any = type(microbatching).__name__.lower()
        size = microbatching.samples if isinstance(microbatching, Plain) else microbatching.tokens
        shares = shares and isinstance(microbatching, Packed) and microbatching.shared
        return Sharding(
            mode=mode, size=size, minibatches=minibatches, equal=equal, quadratic=quadratic, shares=shares, floor=floor
        )

    def shards(self, lengths: Mapping[str, Sequence[int]], ranks: int, groups: Sequence[int] = ()) -> list[Shard]:
        """Return one shard per rank for samples of these lengths, in groups of these sizes. Raises ValueError as
        `shard_batch` does."""
        kinds = {"plain": Plain, "dynamic": Dynamic, "packed": Packed}
        prompts, responses = (lengths[dim] for dim in self.lengths)
        made = shard_batch(
            prompts,
            responses,
            ranks=ranks,
            microbatching=kinds[self.mode](self.size),
            minibatches=self.minibatches,
            equal=self.equal,
            quadratic=self.quadratic,
            groups=groups if self.shares else (),
            floor=self.floor,
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
    groups: Sequence[int] = (),
    floor: float = 0.0,
) -> list[Shard]:
    """Return one shard per rank, from the prompt and response lengths of all samples, in tokens, in canonical order.

    minibatches  equal runs of samples; which samples an update sees does not depend on `ranks`
    equal        every rank has the same number of microbatches in every update, none of them empty, and the i-th ones
                 of all ranks have the same shape. Without it, each rank packs its share alone, which is allowed only
                 for stages without collectives between ranks
    quadratic    a sample of n tokens costs n + quadratic * n^2, and ranks are balanced by cost; 0 balances tokens
    groups       sizes of consecutive groups of samples whose prompts, if they have the same length, are the same. A
                 Packed minibatch then shares them, if its slowest rank takes 5 % less; a row's budget counts a shared
                 prompt once, and ranks have the same number of rows even if not `equal`. None: nothing is shared
    floor        tokens that a row costs at least, when it is decided whether prompts are shared

    With one rank, Plain returns runs of samples in canonical order. All microbatches of Plain have the same shape, for
    the longest prompt and the longest response; those of Dynamic have the length of their longest sample. A Packed row
    is not padded; its `response` is the width of the rectangle that its results are unpacked into.

    Raises ValueError if no plan exists. One always exists if the ranks divide a minibatch and each sample fits the
    budget.
    """
    batch = Lengths(prompts, responses, quadratic, groups)
    _check_arguments(batch, ranks, microbatching, minibatches)
    size = len(batch) // minibatches
    runs = [range(start, start + size) for start in range(0, len(batch), size)]
    divided = [divided_over(batch, run, ranks, microbatching, equal, floor) for run in runs]
    parts = [part for part, _ in divided]
    pads = [_pads(batch, part, microbatching, equal) for part in parts]
    tokens = [sum(batch.responses[i] for i in run) for run in runs]
    shards = []
    for rank in range(ranks):
        index = sorted(chain.from_iterable(chain.from_iterable(part[rank] for part in parts)))
        place = {position: i for i, position in enumerate(index)}
        updates = tuple(
            Update(
                tuple(
                    Microbatch(
                        tuple(sorted(place[position] for position in samples)),
                        *pad,
                        batch.runs(sorted(samples)) if shares else (),
                    )
                    for samples, pad in zip(part[rank], pads_of[rank])
                ),
                count,
                size,
            )
            for (part, shares), pads_of, count in zip(divided, pads, tokens)
        )
        shards.append(Shard(rank, ranks, tuple(index), updates, isinstance(microbatching, Packed)))
    of_all = {
        "padding": waste(shards, prompts, responses),
        "imbalance": balance(shards, prompts, responses, quadratic),
        "shared": saved(shards, prompts, responses),
    }
    return [msgspec.structs.replace(shard, **of_all) for shard in shards]


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


def saved(shards: Sequence[Shard], prompts: Sequence[int], responses: Sequence[int]) -> float:
    """Return the fraction of the tokens of all samples that no rank computes, since samples share prompts."""
    spare = sum(sum(shard.spared([prompts[i] for i in shard.index])) for shard in shards)
    return spare / (sum(prompts) + sum(responses)) if spare else 0.0


def balance(shards: Sequence[Shard], prompts: Sequence[int], responses: Sequence[int], quadratic: float = 0.0) -> float:
    """Return the cost of the slowest rank over the mean of all ranks; 1 is perfect. Ranks wait for each other after
    every update. Padding counts as computed."""
    batch = Lengths(prompts, responses, quadratic)
    slowest = mean = 0.0
    for updates in zip(*(shard.updates for shard in shards)):
        loads = [
            sum(_cost(shard, microbatch, batch) for microbatch in update.microbatches)
            for shard, update in zip(shards, updates)
        ]
        slowest, mean = slowest + max(loads), mean + sum(loads) / len(loads)
    return slowest / mean if mean else 1.0


def _cost(shard: Shard, microbatch: Microbatch, batch: Lengths) -> float:
    """Return the cost of one pass."""
    if shard.packed:
        row = [shard.index[i] for i in microbatch.samples]
        spare = spared([batch.prompts[i] for i in row], microbatch.shared)
        return sum(batch.cost[i] for i in row) - sum(map(batch.worth, spare))
    return len(microbatch.samples) * batch.worth(microbatch.prompt + microbatch.response)


def _check_arguments(batch: Lengths, ranks: int, microbatching: Microbatching, minibatches: int) -> None:
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


def _pads(batch: Lengths, parts: Parts, microbatching: Microbatching, equal: bool) -> list[list[tuple[int, int]]]:
    """Return `prompt` and `response` of each microbatch, [rank][microbatch]."""
    if isinstance(microbatching, Plain):
        whole = max(batch.prompts), max(batch.responses)
        return [[whole] * len(part) for part in parts]
    if not equal:
        return [[batch.pad(samples) for samples in part] for part in parts]
    return [[batch.pad(list(chain.from_iterable(together))) for together in zip(*parts)]] * len(parts)
