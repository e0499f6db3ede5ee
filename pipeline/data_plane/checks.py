"""The checks of every put and get, for any store. Knows fields and columns, no store.

A failed check raises `DataPlaneError` with one `Problem` that names the stage, the key and the field. All checks run
before anything is written, so a put that raises leaves the store unchanged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from pipeline.declare.columns import Column, Ragged
from pipeline.declare.fields import TENSOR_DTYPES, Field
from pipeline.declare.handle import KVBatchMeta
from pipeline.errors import DataPlaneError, Problem, kind_of

if TYPE_CHECKING:
    import torch

_KEY = re.compile(r"\d{8,}_g\d{3,}\Z")


@dataclass(frozen=True)
class PartitionSchema:
    """A declared partition: its fields by name, its readers, and the part of each field."""

    name: str
    fields: Mapping[str, Field]
    readers: frozenset[str]
    part_of: Mapping[str, str]

    @staticmethod
    def of(
        name: str, fields: Sequence[Field], readers: Sequence[str], parts: Mapping[str, Sequence[str]] | None = None
    ) -> PartitionSchema:
        """Build from a declaration. Raises DataPlaneError if two fields share a name, or if a field is not in exactly
        one part."""
        by_name = {field.name: field for field in fields}
        if len(by_name) != len(fields):
            twice = sorted({f.name for f in fields if sum(g.name == f.name for g in fields) > 1})
            raise broken(
                f"partition {name!r}",
                f"field {twice[0]!r} is declared twice",
                "a field has one type",
                "declare it once",
            )
        parts = {name: tuple(by_name)} if parts is None else parts
        members = [field for held in parts.values() for field in held]
        if sorted(members) != sorted(by_name):
            wrong = sorted(set(members) ^ set(by_name)) or sorted({f for f in members if members.count(f) > 1})
            raise broken(
                f"partition {name!r}",
                f"field {wrong[0]!r} is in {members.count(wrong[0])} of its parts, and declared "
                f"{sum(field.name == wrong[0] for field in fields)} times",
                "every field is in one part",
                "list each field in one part",
            )
        return PartitionSchema(
            name, by_name, frozenset(readers), {f: part for part, held in parts.items() for f in held}
        )

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The partitions of the store that hold its fields."""
        return tuple(dict.fromkeys(self.part_of.values())) or (self.name,)

    def divided(self, fields: Iterable[str]) -> dict[str, list[str]]:
        """Return fields by the part that holds them."""
        found: dict[str, list[str]] = {}
        for field in fields:
            found.setdefault(self.part_of[field], []).append(field)
        return found

    @cached_property
    def schema_hash(self) -> str:
        """Hash of what a reader relies on (name, dtype, dims, unit); the writer's bounds may be tighter."""
        columns = sorted((f.name, f.dtype, f.dims, f.unit) for f in self.fields.values())
        return hashlib.sha256(repr(columns).encode()).hexdigest()[:16]


def broken(where: str, what: str, why: str, fix: str) -> DataPlaneError:
    """Return an error with one problem."""
    return DataPlaneError(Problem(where=where, what=what, why=why, fix=fix))


def check_put(
    partition: PartitionSchema, keys: Sequence[str], columns: Mapping[str, Column], *, stage: str
) -> dict[str, tuple[int, ...]]:
    """Check a put and return its lengths, ragged dimension -> one per key. Raises DataPlaneError if it breaks the
    contract."""
    where = _put_by(stage, partition.name)
    _check_keys(where, keys)
    if not columns:
        raise broken(where, "no column", "a put writes at least one field", "give the columns that the stage writes")
    lengths: dict[str, tuple[int, ...]] = {}
    said_by: dict[str, str] = {}
    for name, column in columns.items():
        field = partition.fields.get(name)
        if field is None:
            raise broken(
                where, f"field {name!r} is not declared", f"the partition declares {_names(partition.fields)}",
                "write a declared field, or add it to the stage's `writes`",
            )  # fmt: skip
        _check_kind(where, field, column, keys)
        if not isinstance(column, list):
            _check_range(where, field, column, keys)
        if field.ragged:
            own = tuple(column.lengths)  # type: ignore[union-attr]
            if (other := lengths.setdefault(field.ragged, own)) != own:
                i = next(i for i, (a, b) in enumerate(zip(other, own)) if a != b)
                raise broken(
                    where, f"field {name!r} has {own[i]} entries for key {keys[i]}, "
                    f"field {said_by[field.ragged]!r} has {other[i]}",
                    f"fields that share the dimension {field.ragged} share its lengths",
                    "return both from the same responses",
                )  # fmt: skip
            said_by.setdefault(field.ragged, name)
    return lengths


def check_get(partition: PartitionSchema, meta: KVBatchMeta, fields: Sequence[str], *, reader: str) -> None:
    """Check a get. Raises DataPlaneError if the reader, a field or the handle does not match the declaration."""
    where = f"reader {reader!r}, get from {partition.name!r}"
    if reader not in partition.readers:
        raise broken(
            where, f"{reader!r} is not a declared reader", f"the partition declares {_names(partition.readers)}",
            "register the partition with every reader",
        )  # fmt: skip
    for name in fields:
        if name not in partition.fields:
            raise broken(
                where, f"field {name!r} is not declared", f"the partition declares {_names(partition.fields)}",
                "read a declared field",
            )  # fmt: skip
        if name not in meta.placement_of:
            raise broken(
                where, f"the handle does not name field {name!r} for key {meta.keys[0] if meta.keys else '(none)'}",
                f"it names {_names(meta.placement_of)}", "join the handle of the stage that writes the field",
            )  # fmt: skip
        ragged = partition.fields[name].ragged
        if ragged and ragged not in meta.lengths:
            raise broken(
                where, f"the handle has no lengths of {ragged} for field {name!r}", "they split a ragged column",
                "join the handle that its put returned",
            )  # fmt: skip
    if meta.schema_hash and meta.schema_hash != partition.schema_hash:
        raise broken(
            where, f"the handle was made for schema {meta.schema_hash}, this process declares {partition.schema_hash}",
            "writer and reader declare a partition identically", "register the same fields in both processes",
        )  # fmt: skip


@lru_cache(maxsize=64)
def _canonical(keys: tuple[str, ...]) -> bool:
    return bool(keys) and all(map(_KEY.match, keys)) and all(a < b for a, b in pairwise(keys))


def _check_keys(where: str, keys: Sequence[str]) -> None:
    if _canonical(tuple(keys)):
        return
    if not keys:
        raise broken(where, "no key", "an empty batch has no row", "skip the put if there is nothing to write")
    for i, key in enumerate(keys):
        if not _KEY.match(key):
            raise broken(
                where,
                f"key {key!r}",
                "a key is `{admission:08d}_g{index:03d}`",
                "use pipeline.declare.handle.sample_key",
            )
        if i and key <= keys[i - 1]:
            same = key in keys[:i]
            raise broken(
                where, f"key {key} " + ("is given twice" if same else f"comes after {keys[i - 1]}"),
                "keys are distinct and in canonical (ascending) order", "put in the order of the task's keys",
            )  # fmt: skip


def check_kinds(
    partition: str, fields: Iterable[Field], columns: Mapping[str, Column], keys: Sequence[str], *, stage: str
) -> None:
    """Check type, dtype, shape and row count of the columns of `fields` for these keys before they are merged with
    others, as `check_put` does after that. Raises DataPlaneError."""
    for field in fields:
        _check_kind(_put_by(stage, partition), field, columns[field.name], keys)


def _put_by(stage: str, partition: str) -> str:
    return f"stage {stage!r}, put into {partition!r}"


def _check_kind(where: str, field: Field, column: Column, keys: Sequence[str]) -> None:
    """Check type, dtype, shape and row count of one column."""
    if field.dtype not in TENSOR_DTYPES:
        if field.dtype != "str":
            raise broken(
                where, f"field {field.name!r} holds weights",
                "weights stay in the model; handles carry version and hash", "return them as Output(weights=...)",
            )  # fmt: skip
        if not isinstance(column, list):
            raise _mistyped(where, field, column, "a list of strings")
        for i, text in enumerate(column):
            if not isinstance(text, str) or not _encodes(text):
                key = keys[i] if i < len(keys) else f"row {i}"
                what, why, fix = kind_of(text), "its dtype is str", "use a string"
                if isinstance(text, str):
                    what, why = "half of a surrogate pair", "a text is stored as UTF-8, which has no code for it"
                    fix = "text.encode('utf-8', 'replace').decode()"
                raise broken(where, f"field {field.name!r}, key {key}: {what}", why, fix)
        return _check_count(where, field, len(column), keys)
    import torch

    values = column.values if isinstance(column, Ragged) else column
    if (
        isinstance(column, Ragged) != bool(field.ragged)
        or not isinstance(values, torch.Tensor)
        or not _is_plain(values)
    ):
        raise _mistyped(where, field, column, "a Ragged" if field.ragged else "a tensor")
    if values.dtype != getattr(torch, field.dtype):
        raise broken(
            where, f"field {field.name!r} has dtype {str(values.dtype).removeprefix('torch.')}",
            f"it is declared {field.dtype}", f"convert the column with .to(torch.{field.dtype})",
        )  # fmt: skip
    if tuple(values.shape[1:]) != field.inner or not values.dim():
        raise broken(
            where, f"field {field.name!r} has shape {list(values.shape)}", f"its dims are {field.dims!r}",
            f"give [{'sum of lengths' if field.ragged else 'samples'}{''.join(f', {n}' for n in field.inner)}]",
        )  # fmt: skip
    _check_count(where, field, len(column), keys)
    if isinstance(column, Ragged) and (sum(column.lengths) != len(values) or min(column.lengths) < 0):
        raise broken(
            where, f"field {field.name!r} has {len(values)} entries and lengths that sum to {sum(column.lengths)}",
            "a ragged column concatenates its rows", "build the column with Ragged.of(rows)",
        )  # fmt: skip


def _encodes(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(values: torch.Tensor) -> bool:
    """Return whether a tensor has its values in memory: no nested, sparse or meta tensor."""
    import torch

    return not values.is_nested and values.layout == torch.strided and not values.is_meta


def _check_count(where: str, field: Field, count: int, keys: Sequence[str]) -> None:
    if count != len(keys):
        rows = "1 row" if count == 1 else f"{count} rows"
        raise broken(
            where, f"field {field.name!r} has {rows} for {len(keys)} keys ({keys[0]} to {keys[-1]})",
            "a column has one row per key", "return one row for every sample of the task",
        )  # fmt: skip


def _check_range(where: str, field: Field, column: Column, keys: Sequence[str]) -> None:
    """Check the range in one pass over the values: a NaN or infinite minimum or maximum reveals a bad value."""
    import torch

    values: torch.Tensor = (column.values if isinstance(column, Ragged) else column).detach()  # type: ignore[union-attr]
    floating = values.dtype.is_floating_point
    if not values.numel() or values.dtype == torch.bool or (not floating and field.low is None and field.high is None):
        return
    smallest, largest = (bound.item() for bound in torch.aminmax(values))
    low, high, fix = field.low, field.high, "correct the stage, or widen the field's bounds"
    if floating and (smallest - smallest != 0 or largest - largest != 0):
        bad, why, fix = ~torch.isfinite(values), "NaN and infinity never pass", "correct the stage"
    elif low is not None and smallest < low:
        bad, why = values < low, f"it is at least {_number(low)}"
    elif high is not None and largest > high:
        bad, why = values > high, f"it is at most {_number(high)}"
    else:
        return
    at = int(bad.flatten().nonzero()[0])
    value = values.flatten()[at].item()
    entry = at // max(1, values[0].numel())
    key = _key_of(column, entry, keys)
    raise broken(where, f"field {field.name!r}, key {key}: value {_number(value)}", why, fix)


def _number(value: float) -> str:
    """Return a number in a short form that is exact."""
    short = f"{value:g}"
    return short if float(short) == value or value != value else str(value)


def _key_of(column: Column, entry: int, keys: Sequence[str]) -> str:
    if not isinstance(column, Ragged):
        return keys[entry]
    for key, length in zip(keys, column.lengths):
        if entry < length:
            return f"{key} entry {entry}"
        entry -= length
    return keys[-1]


def _mistyped(where: str, field: Field, column: object, wanted: str) -> DataPlaneError:
    return broken(
        where, f"field {field.name!r} is {kind_of(column)}",
        f"dtype {field.dtype}, dims {field.dims!r} is {wanted}", f"return {wanted}",
    )  # fmt: skip


def _names(names: object) -> str:
    return ", ".join(sorted(names)) or "nothing"  # type: ignore[call-overload]
