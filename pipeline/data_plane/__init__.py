"""The store of columns between stages: its protocol. `memory` is the reference, `transfer_queue` the real one.

The guarantees, tested by one contract suite against both:
- `put` checks schema, shape, dtype, row count, key uniqueness and value ranges, and names stage, key and field.
- A repeated put of the same bytes by the same attempt is a no-op; other bytes raise.
- The attempt is part of the row's name: leftovers of an old attempt are never visible through a newer handle.
- Reading a field that is not present, or was cleared, raises; there is no "all fields". An undeclared reader raises.
- A fetched column never aliases the store. Dense columns come back dense. Clearing is idempotent.
- Every call has a deadline; a lost controller or storage unit is `DataPlaneLost`, never a hang.
- Concurrent calls from several threads may share round trips; each keeps these guarantees, and an error reaches only
  the caller of the failed call.

Row format, for processes outside the graph: `row_name(key, attempt)` names the row of a group; a field of dims "N" is
one tensor [samples of the group]; of dims "N T" one tensor [tokens of all samples, in key order]; a str field is a list
of texts. Messages are signed (`signed`); `outside` does all this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.declare.columns import Column, Columns
from pipeline.declare.fields import Field
from pipeline.declare.handle import KVBatchMeta


class DataPlane(Protocol):
    """One process's access to the columns. All methods are thread-safe. `counts` has the `requests` sent so far, and
    the `hits` and `misses` of its cache, in columns of rows."""

    counts: Counter[str]

    def register(
        self,
        partition: str,
        fields: Sequence[Field],
        readers: Sequence[str],
        parts: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Declare a partition. Every process that puts or gets must declare it identically; repeating it is a no-op.

        `parts` divides its fields over partitions of the store, by name, so that `clear` can remove some fields of a
        group before others; without them the store has one partition. Raises DataPlaneError if it was declared
        differently, or if the parts are not a division of the fields.
        """

    def put(
        self,
        keys: Sequence[str],
        columns: Mapping[str, Column],
        *,
        partition: str,
        stage: str,
        attempt: int = 0,
        unit: str = "sample",
    ) -> KVBatchMeta:
        """Write columns for `keys` (in canonical order) and return a handle that names the fields now present."""

    def get(self, meta: KVBatchMeta, fields: Sequence[str], *, reader: str) -> Columns:
        """Return the named columns, in the order of `meta.keys`."""

    def presence(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], *, attempt: int = 0
    ) -> dict[str, list[bool]]:
        """Return the store's own presence, field -> one bool per key, including fields that external processes wrote.

        Slow; keep it off the hot path. A key is looked up in the row of its group.
        """

    def adopt(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str],
        lengths: Mapping[str, Sequence[int]],
        *,
        attempt: int = 0,
    ) -> KVBatchMeta:
        """Return a handle for externally written fields that `presence` found, in the row format above."""

    def clear(self, meta: KVBatchMeta) -> None:
        """Remove all rows in the handle's placements from the parts that hold its fields; without fields, from all
        parts. Idempotent."""

    def evict(self, rows: Sequence[str]) -> None:
        """Drop rows from this process's cache after another process cleared all their fields."""

    def row_count(self, partition: str) -> int:
        """Return the number of rows in the partition's parts. Slow; for tests and the check at the end of a run."""

    def drain(self) -> None:
        """Remove every row of every partition that this process registered."""

    def close(self) -> None:
        """Disconnect from the store; its creator also shuts it down. Idempotent."""


def row_name(key: str, attempt: int) -> str:
    """Return the name of the row that holds the group of `key`."""
    return f"{key.partition('_')[0]}.{attempt}"
