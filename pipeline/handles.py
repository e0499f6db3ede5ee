"""The driver's table of handles: what each put of a step named, and the handle of any task made from it.

Knows keys and fields, not columns. It also says which groups a put has completed, which is what the scheduler hears.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.meta import KVBatchMeta, group_of, groups_of, keys_of
from pipeline.scheduler import Landed


class HandleTable:
    """Handles of the steps in flight."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._handles: dict[int, dict[str, list[KVBatchMeta]]] = {}  # step -> field -> puts
        self._counts: dict[tuple[int, str, int], int] = {}  # (step, field, group) -> samples, while incomplete

    def add(self, step: int, handle: KVBatchMeta) -> Landed:
        """Take a put's handle; the groups that it completes, for all of its fields."""
        fields = self._handles.setdefault(step, {})
        counts = groups_of(handle.keys)
        complete: dict[int, int] = dict.fromkeys(counts, 0)
        for field in handle.fields:
            fields.setdefault(field, []).append(handle)
            for group, count in counts.items():
                total = self._counts.pop((step, field, group), 0) + count
                if total == self._group_size:
                    complete[group] += 1
                else:
                    self._counts[step, field, group] = total
        whole = tuple(group for group, number in complete.items() if number == len(handle.fields))
        return Landed(step, whole, handle.fields)

    def handle(self, step: int, groups: Sequence[int], fields: Iterable[str]) -> KVBatchMeta | None:
        """The handle of all samples of `groups`, in canonical order, with `fields`; None where there are no fields."""
        keys = keys_of(tuple(groups), self._group_size)
        by_puts: dict[tuple[int, ...], tuple[list[KVBatchMeta], list[str]]] = {}
        for field in fields:
            puts = self._handles[step][field]
            by_puts.setdefault(tuple(map(id, puts)), (puts, []))[1].append(field)
        parts = [_cut([put.select(*names) for put in puts], keys) for puts, names in by_puts.values()]
        return KVBatchMeta.join(parts) if parts else None

    def lengths(self, step: int, keys: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """The lengths of `keys` in every ragged dimension that the puts of the step have told for all of them."""
        known: dict[str, dict[str, int]] = {}
        distinct = {id(put): put for puts in self._handles.get(step, {}).values() for put in puts}
        for put in distinct.values():
            for dim, lengths in put.lengths.items():
                known.setdefault(dim, {}).update(zip(put.keys, lengths))
        return {dim: tuple(map(of.__getitem__, keys)) for dim, of in known.items() if of.keys() >= set(keys)}

    def rows(self, step: int, groups: Sequence[int]) -> KVBatchMeta | None:
        """A handle whose placements name every row of `groups`, to clear them; None where nothing was put."""
        wanted = set(groups)
        distinct = {id(put): put for puts in self._handles.get(step, {}).values() for put in puts}
        parts = []
        for put in distinct.values():
            if wanted >= groups_of(put.keys).keys():
                parts.append(put)
            elif index := [i for i, key in enumerate(put.keys) if group_of(key) in wanted]:
                parts.append(put.reorder(index))
        if not parts:
            return None
        placements = tuple(placement for part in parts for placement in part.placements)
        return KVBatchMeta(keys=parts[0].keys, partition_id=parts[0].partition_id, fields=(), placements=placements)

    def forget(self, step: int) -> None:
        """The step is over."""
        self._handles.pop(step, None)


def _cut(puts: list[KVBatchMeta], keys: tuple[str, ...]) -> KVBatchMeta:
    """One handle on exactly `keys` from puts that together hold at least those."""
    whole = puts[0] if len(puts) == 1 else KVBatchMeta.concat(puts)
    if whole.keys == keys:
        return whole
    at = {key: i for i, key in enumerate(whole.keys)}
    return whole.reorder([at[key] for key in keys])
