"""`Mixture`: several sources with weights, and the arithmetic that picks the source of a draw. Knows no rows.

    Mixture((Dataset("gsm8k", split="train", name="gsm8k"), 2), (Dataset("math.parquet", name="math"), 1))

Draws come in windows of fixed length; in each window every source has its exact share, evenly spread. The source of an
admission number, and the number of earlier draws from it, are therefore pure arithmetic, without state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

from pipeline.declare.parameters import is_number
from pipeline.errors import Problem, kind_of
from stages.sources.dataset import Dataset, dataset_problems
from stages.tasks import Generated

LONGEST_WINDOW = 100_000

Source: TypeAlias = "Generated | str | Path | Dataset"


@dataclass(frozen=True, init=False)
class Mixture:
    """Draws from several sources in proportion to their weights: `Mixture((source, weight), ...)`.

    Weights are numbers above 0 with any sum. Proportions are exact over a window: the shortest one in which every share
    is a whole number of draws, or 100,000 draws with rounded shares. Each source has its own order and draws every row
    once before it repeats one, so a small source with a large weight has more epochs.
    """

    parts: tuple[tuple[Source, float], ...]

    def __init__(self, *parts: tuple[Source, float]) -> None:
        object.__setattr__(self, "parts", parts)

    def problems(self, where: str) -> Iterator[Problem]:
        """Check the sources and their weights."""
        pairs = [part for part in self.parts if isinstance(part, tuple) and len(part) == 2]
        if not self.parts or len(pairs) < len(self.parts):
            wrong = next((part for part in self.parts if part not in pairs), None)
            yield _problem(
                where,
                f"Mixture has {wrong!r:.60}" if self.parts else "Mixture() has no source",
                "a mixture consists of pairs of a source and its weight",
                "write Mixture((first, 2), (second, 1))",
            )
            return
        for source, weight in pairs:
            if not isinstance(source, Generated | str | Path | Dataset):
                yield _problem(
                    where,
                    f"Mixture has a source that is {kind_of(source)}",
                    "it mixes Generated tasks, paths and Datasets",
                    'write Mixture((Dataset("train.jsonl"), 2), (Dataset("openai/gsm8k"), 1))',
                )
            elif isinstance(source, Dataset):
                yield from dataset_problems(source, where)
            if not (is_number(weight) and weight > 0):
                yield _problem(
                    where,
                    f"the weight of {label(source)!r} is {weight!r}",
                    "a weight must be a number above 0",
                    "leave that source out" if weight == 0 else "write 1.0",
                )
                return
        labels = [label(source) for source, _ in pairs]
        for name in dict.fromkeys(name for name in labels if labels.count(name) > 1):
            yield _problem(
                where,
                f"{labels.count(name)} sources are named {name!r}",
                "the field `dataset` tells them apart",
                'write Dataset(..., name="...")',
            )
        for name, count in zip(labels, window_counts([weight for _, weight in pairs])):
            if count == 0:
                yield _problem(
                    where,
                    f"the weight of {name!r} is below 1/{LONGEST_WINDOW:,} of the sum",
                    "it would never be drawn",
                    "raise it, or leave that source out",
                )


@dataclass(frozen=True)
class SourceTurns:
    """A window of draws. Draw i uses `source[i]`, which had `rank[i]` earlier draws; `counts` are draws per source."""

    source: tuple[int, ...]
    rank: tuple[int, ...]
    counts: tuple[int, ...]

    def at(self, draw: int) -> tuple[int, int]:
        """The source of draw number `draw` >= 0, and the number of earlier draws from it."""
        window, position = divmod(draw, len(self.source))
        source = self.source[position]
        return source, window * self.counts[source] + self.rank[position]


def turns(weights: Sequence[float]) -> SourceTurns:
    """The window for weights above 0.

    A source with c draws in a window of W has them at the positions (j + 1/2) W / c, in order of size. After any n
    draws, its count is therefore less than (1 + sources) / 2 away from its share of n.
    """
    counts = window_counts(weights)
    # Equal fractions give equal floats, and others differ by far more than a rounding error.
    order = sorted(((2 * j + 1) / (2 * count), k) for k, count in enumerate(counts) for j in range(count))
    source = tuple(k for _, k in order)
    drawn = [0] * len(counts)
    rank = []
    for k in source:
        rank.append(drawn[k])
        drawn[k] += 1
    return SourceTurns(source, tuple(rank), counts)


def window_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Draws of each source in a window: its share rounded down, or up for the largest remainders."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    window = min(math.lcm(*(share.denominator for share in shares)), LONGEST_WINDOW)
    counts = [math.floor(share * window) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k] * window, k))
    for k in by_remainder[: window - sum(counts)]:
        counts[k] += 1
    return tuple(counts)


def label(source: Source) -> str:
    """The name of a source in the field `dataset`."""
    if isinstance(source, Dataset):
        return source.label
    return source.task if isinstance(source, Generated) else str(source)


def _problem(where: str, what: str, why: str, fix: str) -> Problem:
    return Problem(where=where, what=what, why=why, fix=fix)
