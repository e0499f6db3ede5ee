"""`KVBatchMeta`, the handle that stages exchange: it names rows of the data plane and holds no tensor.

It mirrors `transfer_queue.metadata.KVBatchMeta` (keys, partition_id, fields, extra_info) and adds what a reader
needs to find and slice the columns: lengths, the place of each key, unit, attempt and a schema hash. `fields` lists the
fields of *this* put, not of the schema. The logical unit is the sample; the put chooses what one row of the store
holds, and `Placement` records it.

    handle.select("reward").slice(0, 16)
    KVBatchMeta.join([rollout_handle, reward_handle], fields=("response", "reward"))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec

from pipeline.errors import DataPlaneError, Problem, counted

SIZE_CAP_BYTES_PER_SAMPLE = 1024


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """Where the keys of a handle are: one row index, one position and one start offset per key.

    `rows` are distinct row names; `row[i]` indexes them; `position[i]` counts samples inside the row;
    `offsets[dim][i]` counts entries of the ragged dimension `dim` inside the row before key i.
    """

    rows: tuple[str, ...]
    row: tuple[int, ...]
    position: tuple[int, ...]
    offsets: dict[str, tuple[int, ...]]

    def at(self, index: Sequence[int]) -> Placement:
        """Return the placement of the keys at `index`, without rows that no key uses."""
        used: dict[int, int] = {}
        row = tuple(used.setdefault(self.row[i], len(used)) for i in index)
        return Placement(
            tuple(self.rows[i] for i in used),
            row,
            tuple(self.position[i] for i in index),
            {dim: tuple(offsets[i] for i in index) for dim, offsets in self.offsets.items()},
        )

    @staticmethod
    def chain(parts: Sequence[Placement]) -> Placement:
        """Concatenate placements."""
        used: dict[str, int] = {}
        row = tuple(used.setdefault(part.rows[r], len(used)) for part in parts for r in part.row)
        dims = [dim for dim in parts[0].offsets if all(dim in part.offsets for part in parts)]
        return Placement(
            tuple(used),
            row,
            tuple(p for part in parts for p in part.position),
            {dim: tuple(o for part in parts for o in part.offsets[dim]) for dim in dims},
        )

    def merged(self, other: Placement) -> Placement | None:
        """Return one placement for the fields of both if both name the same rows for every key; else None."""
        if (self.row, self.rows, self.position) != (other.row, other.rows, other.position):
            return None
        if any(self.offsets[dim] != other.offsets[dim] for dim in self.offsets.keys() & other.offsets.keys()):
            return None
        return Placement(self.rows, self.row, self.position, self.offsets | other.offsets)


class KVBatchMeta(msgspec.Struct, frozen=True, kw_only=True):
    """A handle on the columns of some samples. Frozen; every method returns a new handle.

    keys              one per sample, distinct, `{admission:08d}_g{i:03d}`
    partition_id      their namespace
    fields            field names that are present for every key
    lengths           ragged dimension -> entries, one per key ("T" are response tokens)
    placements        where the keys are; `placement_of[field]` indexes them
    extra_info        one dict per handle; never shared between instances
    unit              "sample", "group" or "batch"
    attempt           of the put that created it
    schema_hash       of the registered fields
    """

    keys: tuple[str, ...]
    partition_id: str
    fields: tuple[str, ...]
    lengths: dict[str, tuple[int, ...]] = {}
    placements: tuple[Placement, ...] = ()
    placement_of: dict[str, int] = {}
    extra_info: dict[str, Any] = {}
    unit: str = "sample"
    attempt: int = 0
    schema_hash: str = ""

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("the keys of a handle are not distinct")

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Response tokens, one per key."""
        return self.lengths.get("T", ())

    def placement(self, field: str) -> Placement:
        """Return where `field` is. Raises KeyError if this handle does not name it."""
        return self.placements[self.placement_of[field]]

    def select(self, *fields: str) -> KVBatchMeta:
        """Return the same keys with fewer fields. Raises KeyError for a field that this handle does not name."""
        if missing := [field for field in fields if field not in self.fields]:
            raise KeyError(f"handle has {', '.join(self.fields)}; asked for {', '.join(missing)}")
        return self._with(
            fields=fields, placement_of={f: self.placement_of[f] for f in fields if f in self.placement_of}
        )

    def reorder(self, index: Sequence[int]) -> KVBatchMeta:
        """Return the keys at `index`, in that order, with their lengths: a slice, a shard, a permutation."""
        return self._with(
            keys=tuple(self.keys[i] for i in index),
            lengths={dim: tuple(lengths[i] for i in index) for dim, lengths in self.lengths.items()},
            placements=tuple(placement.at(index) for placement in self.placements),
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Return keys `start` to `stop`, as a list slice does."""
        return self.reorder(range(len(self))[start:stop])

    def chunk(self, count: int) -> list[KVBatchMeta]:
        """Split into `count` handles of nearly equal size, in order; fewer if there are fewer keys."""
        count = min(count, len(self)) or 1
        edges = [len(self) * i // count for i in range(count + 1)]
        return [self.slice(a, b) for a, b in pairwise(edges)]

    @staticmethod
    def concat(handles: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Concatenate handles with the same fields. Raises ValueError across partitions or if fields differ."""
        first = handles[0]
        if len({handle.partition_id for handle in handles}) > 1:
            raise ValueError(
                f"handles of partitions {sorted({h.partition_id for h in handles})} cannot be concatenated"
            )
        if len({frozenset(handle.fields) for handle in handles}) > 1:
            raise ValueError("handles with different fields cannot be concatenated; select the common ones first")
        # One placement per distinct combination over all parts, so that fields stored together stay together.
        combinations: dict[tuple[int, ...], int] = {}
        placement_of = {}
        for field in first.fields:
            if field in first.placement_of:
                combination = tuple(handle.placement_of[field] for handle in handles)
                placement_of[field] = combinations.setdefault(combination, len(combinations))
        dims = set.intersection(*(set(handle.lengths) for handle in handles))
        return first._with(
            keys=tuple(key for handle in handles for key in handle.keys),
            lengths={dim: tuple(n for h in handles for n in h.lengths[dim]) for dim in first.lengths if dim in dims},
            placements=tuple(
                Placement.chain([handle.placements[i] for handle, i in zip(handles, combination)])
                for combination in combinations
            ),
            placement_of=placement_of,
            extra_info={key: value for handle in handles for key, value in handle.extra_info.items()},
            attempt=max(handle.attempt for handle in handles),
        )

    @staticmethod
    def join(handles: Sequence[KVBatchMeta], fields: Iterable[str] | None = None) -> KVBatchMeta:
        """Combine the fields of handles with the same keys in the same order. If several name a field, the last wins.

        Fields in the same rows share one placement in the result.

        Raises ValueError if keys, partitions or the lengths of a dimension differ.
        """
        first = handles[0]
        if any(handle.keys != first.keys or handle.partition_id != first.partition_id for handle in handles):
            raise ValueError("handles to join do not name the same keys of one partition in the same order")
        known: dict[str, tuple[int, ...]] = {}
        for dim, lengths in (each for handle in handles for each in handle.lengths.items()):
            if known.setdefault(dim, lengths) != lengths:
                i = next(i for i, (one, other) in enumerate(zip(known[dim], lengths)) if one != other)
                raise ValueError(
                    f"key {first.keys[i]} has the lengths {known[dim][i]} and {lengths[i]} in dimension {dim}"
                )
        placements: list[Placement] = []
        placement_of: dict[str, int] = {}
        for handle in handles:
            at = [_place(placements, placement) for placement in handle.placements]
            placement_of |= {field: at[i] for field, i in handle.placement_of.items()}
        names = dict.fromkeys(field for handle in handles for field in handle.fields)
        joined = first._with(
            fields=tuple(names),
            lengths=known,
            placements=tuple(placements),
            placement_of=placement_of,
            extra_info={key: value for handle in handles for key, value in handle.extra_info.items()},
            attempt=max(handle.attempt for handle in handles),
        )
        return joined._pruned() if fields is None else joined.select(*fields)._pruned()

    def encode(self) -> bytes:
        """Encode as msgpack. Raises DataPlaneError above the size limit."""
        data = msgspec.msgpack.encode(self)
        if len(data) > SIZE_CAP_BYTES_PER_SAMPLE * max(len(self), 4):
            raise DataPlaneError(
                Problem(
                    where=f"handle of {counted(len(self.fields), 'field')}",
                    what=f"it takes {len(data)} bytes for {counted(len(self), 'sample')}, more than "
                    f"{SIZE_CAP_BYTES_PER_SAMPLE} per sample",
                    why="handles pass through the driver and stay small",
                    fix="let the stage read fewer fields or larger groups, or shorten names and extra_info",
                )
            )
        return data

    @staticmethod
    def decode(data: bytes) -> KVBatchMeta:
        """Decode the output of `encode`. Raises msgspec.ValidationError for anything else."""
        return msgspec.msgpack.decode(data, type=KVBatchMeta)

    def _with(self, **changes: Any) -> KVBatchMeta:
        changes.setdefault("extra_info", dict(self.extra_info))
        return msgspec.structs.replace(self, **changes)

    def _pruned(self) -> KVBatchMeta:
        used = dict.fromkeys(self.placement_of.values())
        renumbered = {old: new for new, old in enumerate(used)}
        return self._with(
            placements=tuple(self.placements[i] for i in used),
            placement_of={field: renumbered[i] for field, i in self.placement_of.items()},
        )


def _place(placements: list[Placement], new: Placement) -> int:
    """Return the index of the placement for `new`: stages that put the same groups share one."""
    for i, placement in enumerate(placements):
        if (merged := placement.merged(new)) is not None:
            placements[i] = merged
            return i
    placements.append(new)
    return len(placements) - 1


def sample_key(admission: int, index: int) -> str:
    """Return the key of sample `index` in the group with this admission number."""
    return f"{admission:08d}_g{index:03d}"


@lru_cache(maxsize=64)
def keys_of(groups: tuple[int, ...], group_size: int) -> tuple[str, ...]:
    """Return the keys of all samples of `groups`, in canonical order. Cached: a batch is requested many times."""
    return tuple(sample_key(group, i) for group in groups for i in range(group_size))


@lru_cache(maxsize=64)
def groups_of(keys: tuple[str, ...]) -> dict[int, int]:
    """Return the number of `keys` per group, in order of first appearance. Read-only."""
    return dict(Counter(map(group_of, keys)))


def group_of(key: str) -> int:
    """Return the admission number in a key."""
    return int(key[:8])


def index_of(key: str) -> int:
    """Return the index of the sample in its group."""
    return int(key.partition("_g")[2])
