"""Which policy versions sampled the tokens of a group. Knows a column with one version per token, no stage: -1 for a
token that no policy sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.declare.handle import groups_of


class Versions(msgspec.Struct, frozen=True):
    """A group's sample count, its oldest and newest token version, and the length of its longest sample.

    A group without any sampled token has version 0.
    """

    samples: int
    oldest: int
    newest: int
    longest: int


def versions_of(column: Any, keys: Sequence[str]) -> dict[int, Versions]:
    """Return the versions by group, in the order of `keys`; samples of a group are adjacent. `column` is a Ragged."""
    import numpy as np

    counts = groups_of(tuple(keys))
    if not counts:
        return {}
    lengths = np.fromiter(column.lengths, dtype=np.int64, count=len(column.lengths))
    ends = np.cumsum(np.fromiter(counts.values(), dtype=np.int64, count=len(counts)))
    longest = np.maximum.reduceat(lengths, np.concatenate([[0], ends[:-1]]))
    tokens = np.concatenate([[0], np.cumsum(lengths)])[ends]  # cumulative tokens at the end of each group
    starts = np.concatenate([[0], tokens[:-1]])
    filled = tokens > starts
    oldest = np.zeros(len(counts), dtype=np.int64)
    newest = np.zeros(len(counts), dtype=np.int64)
    if filled.any():
        values = column.values.numpy()
        newest[filled] = np.maximum.reduceat(values, starts[filled]).clip(min=0)
        sampled = np.where(values < 0, newest.max(), values)
        oldest[filled] = np.minimum(np.minimum.reduceat(sampled, starts[filled]), newest[filled])
    numbers = zip(counts.items(), oldest.tolist(), newest.tolist(), longest.tolist())
    return {group: Versions(count, low, high, tokens) for (group, count), low, high, tokens in numbers}
