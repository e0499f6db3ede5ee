"""Where columns lie between stages: the protocol. `memory` is the reference, `transfer_queue` the real one.

The guarantees, tested by one contract suite against both:
- `put` checks schema, shape, dtype, row count, key uniqueness and value ranges, and names stage, key and field.
- A repeated put of the same bytes by the same attempt is a no-op; other bytes raise.
- The attempt is part of the row's name: what an old attempt leaves behind is never visible through a newer handle.
- Reading what is not present, or was cleared, raises; there is no "all fields". An undeclared reader raises.
- A fetched column never aliases the store. Dense columns come back dense. Clearing is idempotent.
- Every call has a deadline; a lost controller or storage unit is `DataPlaneLost`, never a hang.
- Calls that come from several threads at the same time may share their round trips; each keeps all of the above, and
  what goes wrong with one of them is told to its own caller and to no other.

How rows look in the store, for a process that is no part of the graph: `row_name(key, attempt)` names the row of a
group; a field of dims "N" is one tensor [samples of the group]; of dims "N T" one tensor [tokens of all samples, in key
order]; a str field is a list of texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.declare.columns import Column, Columns
from pipeline.declare.fields import Field
from pipeline.declare.handle import KVBatchMeta


class DataPlane(Protocol):
    """One process's access to the columns. All methods may be called from any thread."""

    def register(self, partition: str, fields: Sequence[Field], readers: Sequence[str]) -> None:
        """Declare a partition. Every process that puts or gets declares it, alike; again with the same is a no-op.

        Raises DataPlaneError where it was declared otherwise.
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
        tags: Sequence[dict] | None = None,
    ) -> KVBatchMeta:
        """Write columns for `keys` (canonical key order) and return the handle that names what is now present."""

    def get(self, meta: KVBatchMeta, fields: Sequence[str], *, reader: str) -> Columns:
        """The named columns, in the order of `meta.keys`."""

    def presence(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], *, attempt: int = 0
    ) -> dict[str, list[bool]]:
        """What the store itself says is there, field -> one bool a key; also what a process outside the graph wrote.

        Slow; off the hot path. A key is looked up in the row of its group.
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
        """The handle on fields that `presence` found: written from outside, laid out as described above."""

    def clear(self, meta: KVBatchMeta) -> None:
        """Remove every row that the handle's placements name, with all fields in it. Idempotent."""

    def evict(self, rows: Sequence[str]) -> None:
        """Forget rows in this process's cache, because another process has cleared them."""

    def row_count(self, partition: str) -> int:
        """Rows that the store holds in the partition. Slow; for tests and for the check at the end of a run."""

    def drain(self) -> None:
        """Remove every row of every partition that this process registered."""

    def close(self) -> None:
        """Let go of the store; the process that created it also ends it. Idempotent."""


def row_name(key: str, attempt: int) -> str:
    """The name of the row that holds the group of `key`."""
    return f"{key.partition('_')[0]}.{attempt}"
