"""Finds the type of an extra column that is given by name only: that of most of its values in the first rows.

    typed_columns("train.jsonl", ("level",), as_text=())    # (FoundColumn("level", Field("level", "int64")),)

Files only: rows of the hub are not read before a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline import Field
from stages.sources.columns import FoundColumn, extra_column
from stages.sources.draws import checked_rows
from stages.sources.mixture import Mixture
from stages.sources.schema import Schema, value_of

_KINDS = {bool: "bool", int: "number", float: "number", str: "str"}  # of a value; others do not count


def typed_columns(source: object, extra: Sequence[Any], as_text: Sequence[str]) -> tuple[Any, ...]:
    """The entries of `extra`, with a typed field where only names are given and most values are numbers or truths.
    Wrong entries and sources stay as they are, for the check."""
    named = {
        i: made
        for i, entry in enumerate(extra)
        if _by_name(entry) and isinstance(made := extra_column(entry), tuple) and made[0] not in as_text
    }
    seen: dict[int, Counter[type]] = {i: Counter() for i in named}
    for row in _rows(source, tuple(named.values())) if named else ():
        for i, (column, _) in named.items():
            seen[i][type(value_of(row, column))] += 1
    typed = {
        i: FoundColumn(named[i][0], replace(named[i][1], dtype=dtype))
        for i, types in seen.items()
        if (dtype := _dtype(types)) != "str"
    }
    return tuple(typed.get(i, entry) for i, entry in enumerate(extra))


def _dtype(types: Counter[type]) -> str:
    """The dtype for the kind that most values have, the first one's if several have as many."""
    kinds: Counter[str] = Counter()
    for kind, count in types.items():
        if kind in _KINDS:
            kinds[_KINDS[kind]] += count
    most = kinds.most_common(1)[0][0] if kinds else "str"
    return most if most != "number" else "float32" if types[float] else "int64"


def _by_name(entry: object) -> bool:
    return isinstance(entry, str) or (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], str))


def _rows(source: object, extra: tuple[tuple[str, Field], ...]) -> Iterator[Mapping[str, Any]]:
    """Yield the first rows of files, as far as they can be read."""
    if isinstance(source, Mixture) and list(source.problems("")):
        return
    layout = Schema(prompt=extra[0][0], answer=None, extra=extra)  # of these columns only
    yield from (row for *_, row in checked_rows(source, lambda dataset: layout))
