"""Maps samples to rows of the store and back: pure arithmetic over keys, lengths and tensors. Knows no store.

Consecutive keys of one group written together form one row. The row of a whole group is `row_name(key, attempt)`; a
part that starts after sample 0 appends the index of its first sample, so parts never collide:

    00000012.0        samples from 0 of group 12, attempt 0
    00000012.0.g004   a part from sample 4, put by another worker
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import add, eq, gt
from typing import TYPE_CHECKING, TypeAlias

from pipeline.data_plane import row_name
from pipeline.data_plane.checks import broken
from pipeline.declare.columns import Column, Ragged
from pipeline.declare.fields import Field
from pipeline.declare.handle import Placement

if TYPE_CHECKING:
    import torch

Value: TypeAlias = "torch.Tensor | list[str]"  # of a field in one row: [entries, *inner], or texts


@dataclass(frozen=True, eq=False)
class Block:
    """A field in some rows: concatenated `values`, with `sizes` entries per row."""

    values: Value
    sizes: Sequence[int]

    def parts(self) -> list[Value]:
        """Return one view per row; for texts, one list per row."""
        if len(self.sizes) == 1:
            return [self.values]
        if isinstance(self.values, list):
            edges = [0, *accumulate(self.sizes)]
            return [self.values[a:b] for a, b in pairwise(edges)]
        return list(self.values.split_with_sizes(list(self.sizes)))  # split() runs much more Python

    @staticmethod
    def of(parts: Sequence[Value]) -> Block:
        """Build one block in new memory from the rows' values. At least one row."""
        sizes = [len(part) for part in parts]
        if isinstance(parts[0], list):
            return Block([text for part in parts for text in part], sizes)
        import torch

        return Block(torch.cat(list(parts)), sizes)  # type: ignore[arg-type]

    def size_bytes(self) -> int:
        """Return the payload in bytes; a text counts as UTF-8."""
        if isinstance(self.values, list):
            return sum(len(text.encode()) for text in self.values)
        return self.values.numel() * self.values.element_size()


@dataclass(frozen=True)
class RowLayout:
    """How the keys of one put split into rows: `edges` are the rows' first keys, then the number of keys."""

    names: tuple[str, ...]
    edges: tuple[int, ...]
    placement: Placement

    def block(self, field: Field, column: Column, lengths: Mapping[str, Sequence[int]]) -> Block:
        """Return the column as stored: on the CPU, contiguous, without gradient; copied only if necessary."""
        if isinstance(column, (list, tuple)):
            return Block(list(column), [b - a for a, b in pairwise(self.edges)])
        values = column.values if isinstance(column, Ragged) else column
        if field.ragged:
            sizes = [sum(lengths[field.ragged][a:b]) for a, b in pairwise(self.edges)]
        else:
            sizes = [b - a for a, b in pairwise(self.edges)]
        return Block(values.detach().cpu().contiguous(), sizes)


def lay_out(keys: Sequence[str], attempt: int, lengths: Mapping[str, Sequence[int]]) -> RowLayout:
    """Return the rows of a put with these keys, which are in canonical order."""
    names, edges, row, position = _rows_of(tuple(keys), attempt)
    offsets = {dim: _starts(row, counts) for dim, counts in lengths.items()}
    return RowLayout(names, edges, Placement(names, row, position, offsets))


@lru_cache(maxsize=64)
def _rows_of(
    keys: tuple[str, ...], attempt: int
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return row names, their edges, and each key's row and position. Cached: several stages put the same keys."""
    names: list[str] = []
    edges: list[int] = []
    row: list[int] = []
    position: list[int] = []
    group = None
    for i, key in enumerate(keys):
        prefix, _, index = key.partition("_")
        if prefix != group:
            group = prefix
            whole = row_name(key, attempt)
            names.append(whole if index == "g000" else f"{whole}.{index}")
            edges.append(i)
        row.append(len(names) - 1)
        position.append(i - edges[-1])
    edges.append(len(keys))
    return tuple(names), tuple(edges), tuple(row), tuple(position)


def _starts(row: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Return the offset of each key inside its row."""
    starts: list[int] = []
    at, current = 0, -1
    for r, count in zip(row, counts):
        if r != current:
            at, current = 0, r
        starts.append(at)
        at += count
    return tuple(starts)


def assemble(
    where: str, field: Field, block: Block, placement: Placement, lengths: Mapping[str, Sequence[int]],
    keys: Sequence[str],
) -> Column:  # fmt: skip
    """Return the column of the placement's keys, in order, from the placement's rows.

    `block` is new memory that the caller of get may own; it is returned as is if the keys cover it in order. Raises
    DataPlaneError if the rows do not match the field's type and the placement.
    """
    base = [0, *accumulate(block.sizes)]
    within = placement.offsets[field.ragged] if field.ragged else placement.position
    counts = lengths[field.ragged] if field.ragged else [1] * len(keys)
    starts = list(map(add, map(base.__getitem__, placement.row), within))
    _check_block(where, field, block, placement, base, starts, counts, keys)
    values = _gather(block.values, starts, counts)
    return Ragged(values, tuple(counts)) if field.ragged else values  # type: ignore[arg-type]


def block_of(where: str, name: str, rows: Sequence[str], values: Sequence[Value]) -> Block:
    """Return the stored values of field `name` in `rows`, in new memory. Raises DataPlaneError if types differ."""
    import torch

    first = values[0]
    if isinstance(first, torch.Tensor):
        dtype, dims, inner = first.dtype, first.dim(), first.shape[1:]
        alike = dims and all(
            isinstance(v, torch.Tensor) and v.dtype == dtype and v.dim() == dims and (dims == 1 or v.shape[1:] == inner)
            for v in values
        )
    else:
        alike = all(isinstance(v, list) and all(isinstance(text, str) for text in v) for v in values)
    if not alike:
        raise broken(
            where, f"field {name!r} has values of different types in row {rows[0]} and the rows after it",
            "a row holds one tensor [entries, *inner] or a list of strings",
            "write rows as pipeline/data_plane/__init__.py describes",
        )  # fmt: skip
    return Block.of(values)


def _gather(values: Value, starts: Sequence[int], counts: Sequence[int]) -> Value:
    """Concatenate entries [start, start + count) of each key; a single slice if they are contiguous."""
    total = sum(counts)
    first = starts[0] if starts else 0
    consecutive = all(map(eq, map(add, starts, counts), starts[1:]))
    if isinstance(values, list):
        return values[first : first + total] if consecutive else [values[start] for start in starts]
    if consecutive:
        return values if total == len(values) else values[first : first + total].clone()
    import torch

    shift = torch.tensor([start - before for start, before in zip(starts, [0, *accumulate(counts)])])
    return values[torch.arange(total) + shift.repeat_interleave(torch.tensor(counts))]


def _check_block(
    where: str, field: Field, block: Block, placement: Placement, base: Sequence[int], starts: Sequence[int],
    counts: Sequence[int], keys: Sequence[str],
) -> None:  # fmt: skip
    """Check type and extent of externally written data, which no put has checked."""
    fix = "write the row as pipeline/data_plane/__init__.py describes"
    if isinstance(block.values, list):
        found, fits = "texts", field.dtype == "str"
    else:
        found = f"{str(block.values.dtype).removeprefix('torch.')} {list(block.values.shape[1:])}"
        fits = found == f"{field.dtype} {list(field.inner)}"
    if not fits:
        raise broken(
            where, f"field {field.name!r}, key {keys[0]}: the store holds {found}",
            f"it is declared {field.dtype}, dims {field.dims!r}", fix,
        )  # fmt: skip
    ends = map(base[1:].__getitem__, placement.row)
    if not any(map(gt, map(add, starts, counts), ends)):
        return
    for i, (row, start, count) in enumerate(zip(placement.row, starts, counts)):
        if start + count > base[row + 1]:
            raise broken(
                where, f"field {field.name!r}, key {keys[i]}: row {placement.rows[row]} has {block.sizes[row]} entries",
                f"the key needs entries {start - base[row]} to {start - base[row] + count}", fix,
            )  # fmt: skip


def same_bytes(a: Value, b: Value) -> bool:
    """Return whether two values of a row are bit-identical."""
    if isinstance(a, list) or isinstance(b, list):
        return a == b
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
