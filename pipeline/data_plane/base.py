"""The common part of both stores: `put`, `get` and `adopt` on top of "write these rows" and "read these rows".

A store is a subclass with `_write`, `_read`, `_remove`, `presence`, `row_count`, `drain`, `evict` and `close`; checks,
row layout and handles are the same for all of them, and are implemented here and in `checks` and `rows`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pipeline.data_plane.checks import PartitionSchema, broken, check_get, check_put
from pipeline.data_plane.rows import Block, assemble, lay_out
from pipeline.declare.columns import Column, Columns
from pipeline.declare.fields import Field
from pipeline.declare.handle import KVBatchMeta, index_of
from pipeline.errors import DataPlaneError

RowsOf: TypeAlias = tuple[str, tuple[str, ...]]  # a part, and rows of it


class RowPlane:
    """Base of the stores. As thread-safe as the subclass's primitives."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # since the start: requests to the store, cache hits and misses
        self._partitions: dict[str, PartitionSchema] = {}
        self._registering = threading.Lock()

    def _write(self, parts: Mapping[str, Mapping[str, Block]], rows: tuple[str, ...], where: str) -> None:
        """Store the blocks of rows in each part. Nothing of a part is stored if one of its rows already has other bytes
        for a field. Keeps no reference to the blocks."""
        raise TypeError(f"{type(self).__name__} does not define _write")

    def _read(self, wanted: Mapping[RowsOf, Sequence[str]], where: str) -> list[dict[str, Block]]:
        """Return the fields of each (part, rows), in new memory. Raises DataPlaneError if one is missing."""
        raise TypeError(f"{type(self).__name__} does not define _read")

    def _remove(self, parts: Sequence[str], rows: Sequence[str]) -> None:
        """Remove rows from each part; missing rows are ignored."""
        raise TypeError(f"{type(self).__name__} does not define _remove")

    def register(
        self, partition: str, fields: Sequence[Field], readers: Sequence[str],
        parts: Mapping[str, Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        """Declare a partition; see `DataPlane.register`."""
        declared = PartitionSchema.of(partition, fields, readers, parts)
        with self._registering:
            before = self._partitions.setdefault(partition, declared)
        if before != declared:
            different = sorted(
                {f.name for f in before.fields.values()} ^ {f.name for f in declared.fields.values()}
                | {n for n, f in declared.fields.items() if before.fields.get(n, f) != f}
                | (before.readers ^ declared.readers)
                | {n for n, part in declared.part_of.items() if before.part_of.get(n, part) != part}
            )
            raise broken(
                f"partition {partition!r}", f"it is already registered with a different {', '.join(different)}",
                "every process declares a partition identically", "use one declaration, or another partition",
            )  # fmt: skip

    def put(
        self, keys: Sequence[str], columns: Mapping[str, Column], *, partition: str, stage: str, attempt: int = 0,
        unit: str = "sample",
    ) -> KVBatchMeta:  # fmt: skip
        """Write columns and return their handle; see `DataPlane.put`."""
        where = f"stage {stage!r}, put into {partition!r}"
        declared = self._declared(partition, where)
        lengths = check_put(declared, keys, columns, stage=stage)
        layout = lay_out(keys, attempt, lengths)
        blocks = {name: layout.block(declared.fields[name], column, lengths) for name, column in columns.items()}
        parts = {part: {n: blocks[n] for n in names} for part, names in declared.divided(blocks).items()}
        self._write(parts, layout.names, where)
        return KVBatchMeta(
            keys=tuple(keys), partition_id=partition, fields=tuple(columns), lengths=lengths,
            placements=(layout.placement,), placement_of=dict.fromkeys(columns, 0),
            unit=unit, attempt=attempt,
            schema_hash=declared.schema_hash,
        )  # fmt: skip

    def get(self, meta: KVBatchMeta, fields: Sequence[str], *, reader: str) -> Columns:
        """Return the named columns, in the order of `meta.keys`; see `DataPlane.get`."""
        where = f"reader {reader!r}, get from {meta.partition_id!r}"
        declared = self._declared(meta.partition_id, where)
        check_get(declared, meta, fields, reader=reader)
        wanted: dict[RowsOf, list[str]] = {}
        for name in dict.fromkeys(fields):
            wanted.setdefault((declared.part_of[name], meta.placement(name).rows), []).append(name)
        blocks: dict[str, Block] = {}
        if len(meta):
            for found in self._read(wanted, where):
                blocks |= found
        return {
            name: assemble(where, declared.fields[name], blocks[name], meta.placement(name), meta.lengths, meta.keys)
            if len(meta)
            else _empty(declared.fields[name])
            for name in fields
        }

    def adopt(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], lengths: Mapping[str, Sequence[int]],
        *, attempt: int = 0,
    ) -> KVBatchMeta:  # fmt: skip
        """Return a handle for rows that an external process wrote; see `DataPlane.adopt`."""
        where = f"adopt from {partition!r}"
        declared = self._declared(partition, where)
        for name in fields:
            if name not in declared.fields:
                raise broken(where, f"field {name!r} is not declared", "only declared fields are read", "register it")
        needed = {dim for name in fields if (dim := declared.fields[name].ragged)}
        own = {dim: tuple(lengths[dim]) for dim in sorted(needed) if dim in lengths}
        if missing := sorted(needed - own.keys()):
            raise broken(where, f"no lengths of {missing[0]}", "they split a ragged column", "give one length per key")
        layout = lay_out(keys, attempt, own)
        for name, start, stop in zip(layout.names, layout.edges, layout.edges[1:]):
            indices = [index_of(key) for key in keys[start:stop]]
            if indices != list(range(len(indices))):
                raise broken(
                    where, f"keys {keys[start]} to {keys[stop - 1]} of row {name}",
                    "a row is read from its first sample", "adopt whole groups, in key order",
                )  # fmt: skip
        return KVBatchMeta(
            keys=tuple(keys), partition_id=partition, fields=tuple(fields), lengths=own,
            placements=(layout.placement,), placement_of=dict.fromkeys(fields, 0), attempt=attempt,
            schema_hash=declared.schema_hash,
        )  # fmt: skip

    def clear(self, meta: KVBatchMeta) -> None:
        """Remove the rows of the handle; see `DataPlane.clear`."""
        declared = self._declared(meta.partition_id, f"clear in {meta.partition_id!r}")
        rows = tuple(dict.fromkeys(row for placement in meta.placements for row in placement.rows))
        if rows:
            self._remove(tuple(declared.divided(meta.fields)) or declared.parts, rows)

    def _parts(self, partition: str) -> tuple[str, ...]:
        declared = self._partitions.get(partition)
        return declared.parts if declared else (partition,)

    def _declared(self, partition: str, where: str) -> PartitionSchema:
        declared = self._partitions.get(partition)
        if declared is None:
            raise broken(
                where, f"partition {partition!r} is not registered in this process",
                "fields and readers are declared before use", "call register(partition, fields, readers) first",
            )  # fmt: skip
        return declared


def absent(where: str, field: str, row: str) -> DataPlaneError:
    """Return the error for reading a field that was never written, or was cleared."""
    return broken(
        where, f"field {field!r} of row {row} is not present", "it was not written yet, or it was cleared",
        "read after the stage that writes it, and before its last reader has acknowledged",
    )  # fmt: skip


def conflict(where: str, field: str, row: str) -> DataPlaneError:
    """Return the error for a second put by the same attempt with different bytes."""
    return broken(
        where, f"field {field!r} of row {row} already has different bytes", "one attempt writes a field once",
        "put them as the next attempt",
    )  # fmt: skip


def _empty(field: Field) -> Column:
    """Return an empty column of the field."""
    if field.dtype == "str":
        return []
    import torch

    from pipeline.declare.columns import Ragged

    values = torch.empty((0, *field.inner), dtype=getattr(torch, field.dtype))
    return Ragged(values, ()) if field.ragged else values
