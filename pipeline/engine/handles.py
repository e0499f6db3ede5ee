"""The driver's table of handles: what each put named, and the handle of any task made from it.

Knows keys and fields, not columns. It also says which groups a put has completed, which is what the scheduler hears.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.data_plane import row_name
from pipeline.declare.handle import KVBatchMeta, Placement, group_of, groups_of, keys_of, sample_key


class HandleTable:
    """Handles on the groups in flight."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._puts: dict[int, KVBatchMeta] = {}
        self._groups_left: dict[int, int] = {}  # put -> groups of it that are in flight
        self._next = 0
        self._of: dict[str, dict[int, tuple[int, ...]]] = {}  # field -> group -> puts that have it
        self._all: dict[int, list[int]] = {}  # group -> every put of it, those that were replaced included
        self._counts: dict[tuple[str, int], int] = {}  # (field, group) -> samples, while incomplete
        self._lost: dict[int, list[str]] = {}  # group -> rows of attempts whose worker was lost

    def add(self, handle: KVBatchMeta) -> tuple[int, ...]:
        """Take a put's handle; the groups that it completes, for all of its fields.

        A put of a later attempt takes the place of what an earlier one has put for the same groups.
        """
        put = self._next
        self._next += 1
        self._puts[put] = handle
        counts = groups_of(handle.keys)
        self._groups_left[put] = len(counts)
        for group in counts:
            self._all.setdefault(group, []).append(put)
        complete: dict[int, int] = dict.fromkeys(counts, 0)
        for field in handle.fields:
            of = self._of.setdefault(field, {})
            for group, count in counts.items():
                before = tuple(p for p in of.get(group, ()) if self._puts[p].attempt == handle.attempt)
                of[group] = (*before, put)
                total = count + (self._counts.pop((field, group), 0) if before else 0)
                if total == self._group_size:
                    complete[group] += 1
                else:
                    self._counts[field, group] = total
        return tuple(group for group, number in complete.items() if number == len(handle.fields))

    def handle(self, groups: Sequence[int], fields: Iterable[str]) -> KVBatchMeta | None:
        """The handle of all samples of `groups`, in canonical order, with `fields`; None where there are no fields."""
        keys = keys_of(tuple(groups), self._group_size)
        by_puts: dict[tuple[int, ...], list[str]] = {}
        for field in fields:
            of = self._of[field]
            puts = tuple(dict.fromkeys(put for group in groups for put in of[group]))
            by_puts.setdefault(puts, []).append(field)
        parts = [_cut([self._puts[put].select(*names) for put in puts], keys) for puts, names in by_puts.items()]
        return KVBatchMeta.join(parts) if parts else None

    def lengths(self, keys: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """The lengths of `keys` in every ragged dimension that the puts have told for all of them."""
        known: dict[str, dict[str, int]] = {}
        for put in self._puts_of(groups_of(tuple(keys))):  # a later attempt comes later
            for dim, lengths in self._puts[put].lengths.items():
                known.setdefault(dim, {}).update(zip(self._puts[put].keys, lengths))
        return {dim: tuple(map(of.__getitem__, keys)) for dim, of in known.items() if of.keys() >= set(keys)}

    def longest(self, groups: Sequence[int], dim: str) -> tuple[int, ...]:
        """The longest sample of each group in a ragged dimension; empty where that is not known of all of them."""
        lengths = self.lengths(keys_of(tuple(groups), self._group_size)).get(dim, ())
        size = self._group_size
        return tuple(max(lengths[start : start + size]) for start in range(0, len(lengths), size))

    def rows(self, groups: Sequence[int]) -> KVBatchMeta | None:
        """A handle whose placements name every row of `groups`, to clear them; None where nothing was put."""
        wanted = set(groups)
        parts = []
        for number in self._puts_of(groups):
            put = self._puts[number]
            if wanted >= groups_of(put.keys).keys():
                parts.append(put)
            elif index := [i for i, key in enumerate(put.keys) if group_of(key) in wanted]:
                parts.append(put.reorder(index))
        if not parts:
            return None
        lost = tuple(row for group in groups for row in self._lost.get(group, ()))
        parts += [_rows(lost, parts[0].partition_id)] if lost else []
        placements = tuple(placement for part in parts for placement in part.placements)
        return KVBatchMeta(keys=parts[0].keys, partition_id=parts[0].partition_id, fields=(), placements=placements)

    def lose(self, groups: Sequence[int], attempt: int) -> None:
        """The worker of an attempt is lost: what it may have put without a report goes when the groups are cleared."""
        for group in groups:
            self._lost.setdefault(group, []).append(row_name(sample_key(group, 0), attempt))

    def late(self, partition: str) -> KVBatchMeta | None:
        """A handle on every row that a lost worker could write after that, once nothing is in flight; None where none
        was lost."""
        rows = tuple(dict.fromkeys(row for lost in self._lost.values() for row in lost))
        return _rows(rows, partition) if rows else None

    def forget(self, groups: Sequence[int]) -> None:
        """These groups were cleared."""
        for group in groups:
            for put in self._all.pop(group, ()):
                self._groups_left[put] -= 1
                if not self._groups_left[put]:
                    del self._puts[put], self._groups_left[put]
            for field, of in self._of.items():
                of.pop(group, None)
                self._counts.pop((field, group), None)

    def __len__(self) -> int:
        return len(self._puts)

    def _puts_of(self, groups: Iterable[int]) -> list[int]:
        """Every put that names any of `groups`, in order of arrival."""
        return sorted({put for group in groups for put in self._all.get(group, ())})


def _rows(rows: tuple[str, ...], partition: str) -> KVBatchMeta:
    """A handle that rows can be cleared with."""
    return KVBatchMeta(keys=(), partition_id=partition, fields=(), placements=(Placement(rows, (), (), {}),))


def _cut(puts: list[KVBatchMeta], keys: tuple[str, ...]) -> KVBatchMeta:
    """One handle on exactly `keys` from puts that together hold at least those."""
    whole = puts[0] if len(puts) == 1 else KVBatchMeta.concat(puts)
    if whole.keys == keys:
        return whole
    at = {key: i for i, key in enumerate(whole.keys)}
    return whole.reorder([at[key] for key in keys])
