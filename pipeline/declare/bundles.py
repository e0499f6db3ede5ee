"""Packed rows in which samples of a group lie together, so that their prompt is computed once. Arithmetic only.

A group is cut into bundles: some of its samples with one copy of their prompt. Few bundles spare the most tokens, many
fill rows and ranks more evenly. `shared_rows` tries one, two, four ... bundles a group; the caller takes the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.declare.lengths import Lengths
from pipeline.declare.partition import rows_within


def shared_rows(batch: Lengths, members: Sequence[int], ranks: int, tokens: int) -> Iterator[list[list[int]]]:
    """Yield ways to divide `members` into rows of at most `tokens` tokens, a shared prompt counted once, whose number
    `ranks` divide. Samples of a row ascend. No sample may have more than `tokens` tokens."""
    groups: dict[int, list[int]] = {}
    for i in members:
        groups.setdefault(batch.group[i], []).append(i)
    most, pieces = max(map(len, groups.values())), 1
    while pieces < most:
        bundles = [bundle for group in groups.values() for bundle in _bundles(batch, group, pieces, tokens)]
        size = [batch.row_tokens(bundle) for bundle in bundles]
        cost = [batch.row_cost(bundle) for bundle in bundles]
        rows = rows_within(tokens, range(len(bundles)), size, cost, multiple=ranks)
        if len(rows) % ranks == 0:
            yield [sorted(i for bundle in row for i in bundles[bundle]) for row in rows]
        pieces *= 2


def _bundles(batch: Lengths, group: Sequence[int], pieces: int, tokens: int) -> list[list[int]]:
    """Cut one group into at least `pieces` bundles if it has enough samples, each within `tokens`."""
    room = max(1, tokens - batch.prompts[group[0]])
    prompt = batch.worth(batch.prompts[group[0]])
    own = [cost - prompt for cost in (batch.cost[i] for i in group)]
    size = [batch.responses[i] for i in group]
    cut = rows_within(room, range(len(group)), size, own, multiple=min(pieces, len(group)))
    return [sorted(group[i] for i in row) for row in cut]
