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
from pipeline.data_plane.base import RowPlane, absent, conflict
from pipeline.data_plane.rows import Block, Value, block_of, same_bytes


class MemoryPlane(RowPlane):
    """Each row is a dict field -> value; values are copied in and out."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, dict[str, Value]]] = {}

    def _write(self, partition: str, rows: tuple[str, ...], blocks: Mapping[str, Block], where: str) -> None:
        with self._lock:
            held = self._rows.setdefault(partition, {})
            new = []
            for field, block in blocks.items():
                for row, part in zip(rows, block.parts()):
                    before = held.get(row, {}).get(field)
                    if before is None:
                        new.append((row, field, part))
                    elif not same_bytes(before, part):
                        raise conflict(where, field, row)
            for row, field, part in new:
                held.setdefault(row, {})[field] = list(part) if isinstance(part, list) else part.clone()

    def _read(
        self, partition: str, wanted: Mapping[tuple[str, ...], Sequence[str]], where: str
    ) -> list[dict[str, Block]]:
        with self._lock:
            held = self._rows.get(partition, {})
            for rows, fields in wanted.items():
                for field in fields:
                    for row in rows:
                        if field not in held.get(row, {}):
                            raise absent(where, field, row)
            return [
                {name: block_of(where, name, rows, [held[row][name] for row in rows]) for name in fields}
                for rows, fields in wanted.items()
            ]

    def _remove(self, partition: str, rows: Sequence[str]) -> None:
        with self._lock:
            held = self._rows.get(partition, {})
            for row in rows:
                held.pop(row, None)

    def write_outside(self, partition: str, row: str, values: Mapping[str, Value]) -> None:
        """Write a row without checks, as an external process does in TransferQueue."""
        with self._lock:
            self._rows.setdefault(partition, {}).setdefault(row, {}).update(values)

    def presence(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], *, attempt: int = 0
    ) -> dict[str, list[bool]]:
        """Return which fields are present; see `DataPlane.presence`."""
        declared = self._declared(partition, f"presence in {partition!r}")
        with self._lock:
            held = self._rows.get(partition, {})
            return {
                field: [_holds(held, key, field, attempt, bool(declared.fields[field].ragged)) for key in keys]
                for field in fields
            }

    def evict(self, rows: Sequence[str]) -> None:
        """Do nothing: this store has no cache."""

    def row_count(self, partition: str) -> int:
        """Return the number of rows in the partition."""
        with self._lock:
            return len(self._rows.get(partition, {}))

    def drain(self) -> None:
        """Remove every row of every registered partition."""
        with self._lock:
            for partition in self._partitions:
                self._rows.pop(partition, None)

    def close(self) -> None:
        """Drop all rows."""
        with self._lock:
            self._rows.clear()


def _holds(held: Mapping[str, Mapping], key: str, field: str, attempt: int, ragged: bool) -> bool:
    value = held.get(row_name(key, attempt), {}).get(field)
    return value is not None and (ragged or int(key.partition("_g")[2]) < len(value))
