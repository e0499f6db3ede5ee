"""Caches the rows that one process wrote or fetched, up to a byte limit. Knows rows and fields, no store.

Rows of one put share memory, which is freed when the last of them is dropped. The limit counts that memory, so it holds
in any eviction order. The least recently used row is evicted first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline.data_plane.rows import Block

OVERHEAD_BYTES = 256  # overhead per value, so that many small values are bounded too
EVERY_ROW = ""


class _Shared:
    """The memory of one field of one put, and the number of rows that still use it."""

    __slots__ = ("rows", "size_bytes")

    def __init__(self, size_bytes: int, rows: int) -> None:
        self.size_bytes = size_bytes
        self.rows = rows


class RowCache:
    """An LRU cache of rows in all partitions. `get` copies; cached values are never exposed."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.size_bytes = 0
        self._lock = threading.Lock()
        self._rows: OrderedDict[tuple[str, str], dict[str, tuple[Any, _Shared]]] = OrderedDict()
        self._partitions: dict[str, set[str]] = {}
        self._fetches: dict[int, set[str]] = {}  # under way, by id: rows that were forgotten meanwhile

    @contextmanager
    def fetching(self) -> Iterator[set[str]]:
        """Yield a set that gets the rows that are forgotten in this context: what is fetched of them may be cleared."""
        gone: set[str] = set()
        self._fetches[id(gone)] = gone
        try:
            yield gone
        finally:
            del self._fetches[id(gone)]

    def keep(
        self, partition: str, rows: Sequence[str], blocks: Mapping[str, Block], gone: Collection[str] = ()
    ) -> None:
        """Copy the blocks of `rows`, unless one of them is `gone`. A block larger than the whole cache is skipped."""
        copies = {}
        for field, block in blocks.items():
            size = block.size_bytes() + OVERHEAD_BYTES * len(rows)
            if size <= self.capacity_bytes:
                values = block.values if isinstance(block.values, list) else block.values.clone()
                copies[field] = (Block(values, block.sizes).parts(), _Shared(size, len(rows)))
        if not copies:
            return
        with self._lock:
            if EVERY_ROW in gone or any(row in gone for row in rows):
                return
            for i, row in enumerate(rows):
                held = self._rows.setdefault((partition, row), {})
                self._rows.move_to_end((partition, row))
                self._partitions.setdefault(row, set()).add(partition)
                for field, (parts, shared) in copies.items():
                    if before := held.get(field):
                        self._release(before[1])
                    held[field] = (parts[i], shared)
            self.size_bytes += sum(shared.size_bytes for _, shared in copies.values())
            while self.size_bytes > self.capacity_bytes:
                self._drop(next(iter(self._rows)))

    def get(self, partition: str, rows: Sequence[str], fields: Sequence[str]) -> dict[str, Block]:
        """Return the fields that are cached for all of the rows, in new memory."""
        with self._lock:
            held = [self._rows.get((partition, row), {}) for row in rows]
            found = {f: [h[f][0] for h in held] for f in fields if all(f in h for h in held)}
            if found:
                for row in rows:
                    self._rows.move_to_end((partition, row))
        return {field: Block.of(parts) for field, parts in found.items()}

    def forget(self, rows: Sequence[str], partitions: Sequence[str] | None = None) -> None:
        """Drop rows from these partitions; None is all of them."""
        with self._lock:
            for gone in tuple(self._fetches.values()):
                gone.update(rows)
            for row in rows:
                for partition in tuple(self._partitions.get(row, ())):
                    if partitions is None or partition in partitions:
                        self._drop((partition, row))

    def forget_all(self) -> None:
        """Drop everything."""
        with self._lock:
            for gone in tuple(self._fetches.values()):
                gone.add(EVERY_ROW)
            self._rows.clear()
            self._partitions.clear()
            self.size_bytes = 0

    def _drop(self, at: tuple[str, str]) -> None:
        for _, shared in self._rows.pop(at).values():
            self._release(shared)
        partition, row = at
        self._partitions[row].discard(partition)
        if not self._partitions[row]:
            del self._partitions[row]

    def _release(self, shared: _Shared) -> None:
        shared.rows -= 1
        if not shared.rows:
            self.size_bytes -= shared.size_bytes
