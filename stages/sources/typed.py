"""Finds the type of an extra column that is given by name only: that of its values in the first rows.

    typed_columns("train.jsonl", ("level",), as_text=())    # (("level", Field("level", "int64")),)

Files only: rows of the hub are not read before a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline import Field, StageError
from pipeline.reading import BROKEN
from stages.sources import jsonl
from stages.sources.columns import extra_column
from stages.sources.dataset import Dataset, Files, locate
from stages.sources.draws import CHECKED_ROWS, first_rows
from stages.sources.mixture import Mixture
from stages.sources.schema import Schema, value_of

_KINDS = (({bool}, "bool"), ({int}, "int64"), ({int, float}, "float32"))  # the types of a column's values


def typed_columns(source: object, extra: Sequence[Any], as_text: Sequence[str]) -> tuple[Any, ...]:
    """The entries of `extra`, with a typed field where only names are given and the values are numbers or truths.
    Wrong entries and sources stay as they are, for the check."""
    named = {
        i: made
        for i, entry in enumerate(extra)
        if _by_name(entry) and isinstance(made := extra_column(entry), tuple) and made[0] not in as_text
    }
    seen: dict[int, set[type]] = {i: set() for i in named}
    for row in _rows(source, tuple(named.values())) if named else ():
        for i, (column, _) in named.items():
            seen[i].add(type(value_of(row, column)))
    found = {i: next((dtype for kinds, dtype in _KINDS if types and types <= kinds), None) for i, types in seen.items()}
    typed = {i: (named[i][0], replace(named[i][1], dtype=dtype)) for i, dtype in found.items() if dtype}
    return tuple(typed.get(i, entry) for i, entry in enumerate(extra))


def _by_name(entry: object) -> bool:
    return isinstance(entry, str) or (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], str))


def _rows(source: object, extra: tuple[tuple[str, Field], ...]) -> Iterator[Mapping[str, Any]]:
    """Yield the first rows of files, as far as they can be read."""
    if isinstance(source, Mixture):
        for part, _ in () if list(source.problems("")) else source.parts:
            yield from _rows(part, extra)
        return
    if not isinstance(source, str | Path | Dataset):
        return
    layout = Schema(prompt=extra[0][0], answer=None, extra=extra)  # of these columns only
    with suppress(StageError, *BROKEN, TypeError):
        located = locate(source if isinstance(source, Dataset) else Dataset(source), "")
        paths = located.paths if isinstance(located, Files) else ()
        limit = -(-CHECKED_ROWS // max(1, len(paths)))
        for path in paths:
            for where, row in islice(first_rows(path, layout, limit), limit):
                with suppress(StageError):
                    yield jsonl.parse(row, where) if isinstance(row, bytes) else row
