"""The in-process data plane: the reference semantics.

    plane = MemoryPlane()
    plane.register("batch", [REWARD], readers=["train"])
    handle = plane.put(["00000000_g000"], {"reward": torch.ones(1)}, partition="batch", stage="reward")
    plane.get(handle, ["reward"], reader="train")

Rows are dicts under one lock. Knows no network and no other process.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from pipeline.data_plane import row_name
from pipeline.data_plane.base import RowPlane, RowsOf, absent, conflict
from pipeline.data_plane.rows import Block, Value, block_of, same_bytes
from pipeline.declare.handle import index_of


class MemoryPlane(RowPlane):
    """Each row is a dict field -> value; values are copied in and out."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, dict[str, Value]]] = {}

    def _write(self, parts: Mapping[str, Mapping[str, Block]], rows: tuple[str, ...], where: str) -> None:
        with self._lock:
            new = []
            for part, blocks in parts.items():
                held = self._rows.setdefault(part, {})
                for field, block in blocks.items():
                    for row, value in zip(rows, block.parts()):
                        before = held.get(row, {}).get(field)
                        if before is None:
                            new.append((held, row, field, value))
                        elif not same_bytes(before, value):
                            raise conflict(where, field, row)
            for held, row, field, value in new:
                held.setdefault(row, {})[field] = list(value) if isinstance(value, list) else value.clone()

    def _read(self, wanted: Mapping[RowsOf, Sequence[str]], where: str) -> list[dict[str, Block]]:
        with self._lock:
            for (part, rows), fields in wanted.items():
                held = self._rows.get(part, {})
                for field in fields:
                    for row in rows:
                        if field not in held.get(row, {}):
                            raise absent(where, field, row)
            return [
                {name: block_of(where, name, rows, [self._rows[part][row][name] for row in rows]) for name in fields}
                for (part, rows), fields in wanted.items()
            ]

    def _remove(self, parts: Sequence[str], rows: Sequence[str]) -> None:
        with self._lock:
            for part in parts:
                held = self._rows.get(part, {})
                for row in rows:
                    held.pop(row, None)

    def write_outside(self, partition: str, row: str, values: Mapping[str, Value]) -> None:
        """Write a row without checks, as an external process does in TransferQueue."""
        declared = self._declared(partition, f"write into {partition!r}")
        with self._lock:
            for field, value in values.items():
                self._rows.setdefault(declared.part_of[field], {}).setdefault(row, {})[field] = value

    def presence(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], *, attempt: int = 0
    ) -> dict[str, list[bool]]:
        """Return which fields are present; see `DataPlane.presence`."""
        declared = self._declared(partition, f"presence in {partition!r}")
        with self._lock:
            found = {}
            for field in fields:
                held, whole = self._rows.get(declared.part_of[field], {}), bool(declared.fields[field].ragged)
                found[field] = [_holds(held, key, field, attempt, whole) for key in keys]
            return found

    def evict(self, rows: Sequence[str]) -> None:
        """Do nothing: this store has no cache."""

    def row_count(self, partition: str) -> int:
        """Return the number of rows in the partition's parts."""
        with self._lock:
            return sum(len(self._rows.get(part, {})) for part in self._parts(partition))

    def drain(self) -> None:
        """Remove every row of every registered partition."""
        with self._lock:
            for declared in self._partitions.values():
                for part in declared.parts:
                    self._rows.pop(part, None)

    def close(self) -> None:
        """Drop all rows."""
        with self._lock:
            self._rows.clear()


def _holds(held: Mapping[str, Mapping], key: str, field: str, attempt: int, ragged: bool) -> bool:
    value = held.get(row_name(key, attempt), {}).get(field)
    return value is not None and (ragged or index_of(key) < len(value))
