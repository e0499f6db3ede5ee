"""The values of a field for some samples, as a stage sees them. Knows tensors, not where they are stored.

A column is one of three things, by its field:
  dims "N" or "N 3 4"   a torch tensor, samples first
  dims "N T ..."        a `Ragged`: the samples' rows concatenated, and their lengths
  dtype "str"           a list of texts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths. `values` is [sum of lengths, *inner]; `lengths` has one integer per sample."""

    values: torch.Tensor
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[torch.Tensor]:
        """Return one view per sample, [length, *inner]."""
        return list(self.values.split(list(self.lengths)))

    @staticmethod
    def of(rows: Sequence[torch.Tensor]) -> Ragged:
        """Build from one tensor per sample. At least one row."""
        import torch

        return Ragged(torch.cat(list(rows)), tuple(len(row) for row in rows))


Column: TypeAlias = "torch.Tensor | Ragged | list[str]"
Columns: TypeAlias = "dict[str, Column]"


def size_bytes(column: Column) -> int:
    """Return the payload of a column in bytes; a text counts as UTF-8."""
    if isinstance(column, list):
        return sum(len(text.encode()) for text in column)
    values = column.values if isinstance(column, Ragged) else column
    return values.numel() * values.element_size()


def group_bytes(column: Column, samples: Sequence[int]) -> list[int]:
    """Return the payload in bytes of each run of consecutive samples, as `size_bytes` counts. `samples` are their
    numbers, which add up to the column's."""
    if isinstance(column, list):
        counts = [len(text.encode()) for text in column]
    elif isinstance(column, Ragged):
        entry = column.values.element_size() * prod(column.values.shape[1:])
        counts = [length * entry for length in column.lengths]
    else:
        counts = [column.element_size() * prod(column.shape[1:])] * len(column)
    return summed(counts, samples)


def summed(counts: Sequence[int], samples: Sequence[int]) -> list[int]:
    """Return the sum of each run of consecutive counts; `samples` are the lengths of the runs."""
    edges = [0, *accumulate(samples)]
    return [sum(counts[a:b]) for a, b in pairwise(edges)]


def plain_values(column: Column) -> list[Any]:
    """Convert a column to one plain Python value per sample: a text, a number, or a list."""
    if isinstance(column, Ragged):
        return [row.tolist() for row in column.rows()]
    return column if isinstance(column, list) else column.tolist()


def take(column: Column, index: Sequence[int]) -> Column:
    """Copy the samples at `index`, in that order."""
    import torch

    if isinstance(column, list):
        return [column[i] for i in index]
    if isinstance(column, Ragged):
        rows = column.rows()
        if not index:
            return Ragged(column.values[:0].clone(), ())
        return Ragged.of([rows[i] for i in index])
    return column[torch.as_tensor(list(index), dtype=torch.long)]


def concat(columns: Sequence[Column]) -> Column:
    """Concatenate columns of one field. At least one."""
    import torch

    first = columns[0]
    if isinstance(first, list):
        return [text for column in columns for text in column]  # type: ignore[union-attr]
    if isinstance(first, Ragged):
        ragged: list[Ragged] = list(columns)  # type: ignore[arg-type]
        return Ragged(torch.cat([c.values for c in ragged]), tuple(n for c in ragged for n in c.lengths))
    return torch.cat(list(columns))  # type: ignore[arg-type]


def in_order(parts: Sequence[tuple[Columns, Sequence[int]]]) -> tuple[Columns, Sequence[int]]:
    """Merge the columns of several parts, in ascending order of their positions. At least one part."""
    if len(parts) == 1 and all(a < b for a, b in pairwise(parts[0][1])):
        return parts[0]
    index = [position for _, positions in parts for position in positions]
    columns = {name: concat([part[name] for part, _ in parts]) for name in parts[0][0]}
    order = sorted(range(len(index)), key=index.__getitem__)
    if order != list(range(len(index))):
        columns = {name: take(column, order) for name, column in columns.items()}
    return columns, [index[i] for i in order]
