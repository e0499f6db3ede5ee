"""The driver's table of handles: stores the handle of each put and makes the handle of each task from them.

Knows keys and fields, not columns. It also determines which groups a put has completed; the scheduler needs only that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.data_plane import row_name
from pipeline.declare.handle import KVBatchMeta, Placement, group_of, groups_of, keys_of, sample_key
from pipeline.errors import DataPlaneError, Problem


class HandleTable:
    """The handles of the groups in flight."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._puts: dict[int, KVBatchMeta] = {}
        self._groups_left: dict[int, int] = {}  # put -> number of its groups in flight
        self._next = 0
        self._of: dict[str, dict[int, tuple[int, ...]]] = {}  # field -> group -> puts with this field of the group
        self._all: dict[int, list[int]] = {}  # group -> all its puts, replaced ones included
        self._counts: dict[tuple[str, int], int] = {}  # (field, group) -> samples present, while incomplete
        self._sizes: dict[str, dict[str, tuple[int, int]]] = {}  # ragged dimension -> key -> attempt, length
        self._lost: dict[int, list[str]] = {}  # group -> rows of attempts whose worker was lost

    def add(self, handle: KVBatchMeta) -> tuple[int, ...]:
        """Add the handle of a put. Returns the groups that are now complete in all of its fields.

        A put of a later attempt replaces the puts of earlier attempts for the same groups. Raises DataPlaneError if a
        sample has another length than in a put of the same attempt with the same ragged dimension.
        """
        self._check_lengths(handle)
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

    def _check_lengths(self, handle: KVBatchMeta) -> None:
        for dim, lengths in handle.lengths.items():
            known = self._sizes.setdefault(dim, {})
            for key, length in zip(handle.keys, lengths):
                attempt, other = known.get(key, (-1, 0))
                if attempt == handle.attempt and other != length:
                    raise _unequal(handle.fields, f"{key} has the length {length} in {dim}, and {other} before")
                if attempt <= handle.attempt:
                    known[key] = (handle.attempt, length)

    def handle(self, groups: Sequence[int], fields: Iterable[str]) -> KVBatchMeta | None:
        """Return the handle of all samples of `groups`, in canonical order, with `fields`; None without fields."""
        keys = keys_of(tuple(groups), self._group_size)
        by_puts: dict[tuple[int, ...], list[str]] = {}
        for field in fields:
            of = self._of[field]
            puts = tuple(dict.fromkeys(put for group in groups for put in of[group]))
            by_puts.setdefault(puts, []).append(field)
        parts = [_cut([self._puts[put].select(*names) for put in puts], keys) for puts, names in by_puts.items()]
        try:
            return KVBatchMeta.join(parts) if parts else None
        except ValueError as error:
            raise _unequal([name for own in by_puts.values() for name in own], str(error)) from error

    def complete(self, fields: Iterable[str]) -> list[int]:
        """Return the groups of which every sample has all of `fields`, ascending; without fields, every group."""
        having = [{g for g in self._of.get(field, ()) if (field, g) not in self._counts} for field in fields]
        return sorted(set(self._all).intersection(*having))

    def lengths(self, keys: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return the lengths of `keys` in every ragged dimension in which all of them are known."""
        return {
            dim: tuple(known[key][1] for key in keys)
            for dim, known in self._sizes.items()
            if keys and known.keys() >= set(keys)
        }

    def longest(self, groups: Sequence[int], dim: str) -> tuple[int, ...]:
        """Return the length of each group's longest sample in a ragged dimension; empty unless all are known."""
        lengths = self.lengths(keys_of(tuple(groups), self._group_size)).get(dim, ())
        size = self._group_size
        return tuple(max(lengths[start : start + size]) for start in range(0, len(lengths), size))

    def rows(self, groups: Sequence[int], fields: Sequence[str] = ()) -> KVBatchMeta | None:
        """Return a handle for clearing the rows of `groups` that hold any of these fields, or without fields every row;
        None if nothing was put."""
        wanted, named = set(groups), set(fields)
        parts = []
        for number in self._puts_of(groups):
            put = self._puts[number]
            if named and named.isdisjoint(put.fields):
                continue
            if wanted >= groups_of(put.keys).keys():
                parts.append(put)
            elif index := [i for i, key in enumerate(put.keys) if group_of(key) in wanted]:
                parts.append(put.reorder(index))
        if not parts:
            return None
        lost = tuple(row for group in groups for row in self._lost.get(group, ()))
        parts += [_rows(lost, parts[0].partition_id)] if lost else []
        placements = tuple(placement for part in parts for placement in part.placements)
        first = parts[0]
        return KVBatchMeta(
            keys=first.keys, partition_id=first.partition_id, fields=tuple(fields), placements=placements
        )

    def lose(self, groups: Sequence[int], attempt: int) -> None:
        """Record that an attempt's worker was lost. Rows that it put without a report are cleared with the groups."""
        for group in groups:
            self._lost.setdefault(group, []).append(row_name(sample_key(group, 0), attempt))

    def late(self, partition: str) -> KVBatchMeta | None:
        """Return a handle for clearing every row that a lost worker may have put after its groups were cleared; None if
        no worker was lost."""
        rows = tuple(dict.fromkeys(row for lost in self._lost.values() for row in lost))
        return _rows(rows, partition) if rows else None

    def forget(self, groups: Sequence[int]) -> None:
        """Forget groups that were cleared."""
        for group in groups:
            for put in self._all.pop(group, ()):
                self._groups_left[put] -= 1
                if not self._groups_left[put]:
                    del self._puts[put], self._groups_left[put]
            for field, of in self._of.items():
                of.pop(group, None)
                self._counts.pop((field, group), None)
        keys = keys_of(tuple(groups), self._group_size)
        for known in self._sizes.values():
            for key in keys:
                known.pop(key, None)

    def __len__(self) -> int:
        return len(self._puts)

    def _puts_of(self, groups: Iterable[int]) -> list[int]:
        """Return every put that names any of `groups`, in order of arrival."""
        return sorted({put for group in groups for put in self._all.get(group, ())})


def _rows(rows: tuple[str, ...], partition: str) -> KVBatchMeta:
    """Return a handle for clearing rows."""
    return KVBatchMeta(keys=(), partition_id=partition, fields=(), placements=(Placement(rows, (), (), {}),))


def _cut(puts: list[KVBatchMeta], keys: tuple[str, ...]) -> KVBatchMeta:
    """Return one handle on exactly `keys`, from puts that together contain at least those."""
    whole = puts[0] if len(puts) == 1 else KVBatchMeta.concat(puts)
    if whole.keys == keys:
        return whole
    at = {key: i for i, key in enumerate(whole.keys)}
    return whole.reorder([at[key] for key in keys])


def _unequal(fields: Sequence[str], what: str) -> DataPlaneError:
    """Return the error for lengths of one dimension that differ."""
    return DataPlaneError(
        Problem(
            where=f"fields {', '.join(fields)}",
            what=what,
            why="fields that share a dimension share its lengths",
            fix="let the stage that writes the second field read the first, or declare another dimension",
        )
    )
