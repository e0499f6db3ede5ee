"""Draws: map an admission number to the values of its prompt. Knows the order of rows, not file formats.

Each epoch of a source has every row once. The row of a draw depends only on the seed and the draw's number, so any
order of admission, a resume and another process give the same rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

from pipeline import StageError
from pipeline.errors import Problem
from pipeline.reading import BROKEN
from stages.sources import jsonl
from stages.sources.dataset import Dataset, Files, Hub, SavedDataset, locate
from stages.sources.mixture import Mixture, Source, label, turns
from stages.sources.schema import Schema
from stages.tasks import Generated

CHECKED_ROWS = 1000  # per data set, before the run; the run itself checks all rows
CHECKED_ARRAYS = 8  # the same, if rows hold arrays
_SHOWN = 3  # invalid rows that are reported one by one
_NEXT_SEED = 0x9E3779B97F4A7C15  # between the seeds of the sources of a mixture

Draw = Callable[[int], tuple[str, tuple]]


class Table(Protocol):
    """Rows by number, checked when opened. Relative paths in rows start at `folder`."""

    folder: Path

    def __len__(self) -> int:
        """Number of rows."""

    def row(self, index: int, where: str) -> dict[str, Any]:
        """The columns of a row; `where` is for errors."""

    def where(self, index: int) -> str:
        """File and row, for messages."""


class TableRows(Sequence[tuple]):
    """The rows of several tables in sequence, as the values of a layout's fields."""

    def __init__(self, tables: Sequence[Table], layout: Schema) -> None:
        self._tables, self._layout = tables, layout
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        k = bisect_right(self._ends, index)
        table, i = self._tables[k], index - (self._ends[k - 1] if k else 0)
        try:
            return self._read(table, i, "")
        except StageError:  # again with its line, which is slow to find
            return self._read(table, i, table.where(i))

    def _read(self, table: Table, index: int, where: str) -> tuple:
        return self._layout.read(table.row(index, where), where, folder=table.folder)


def open_rows(source: str | Path | Dataset, layout: Schema) -> TableRows:
    """Open a data set and check every row. Raises StageError with file and row for the first invalid one."""
    dataset = source if isinstance(source, Dataset) else Dataset(source)
    layout = layout.of(dataset)
    located = locate(dataset, dataset.label)
    rows = TableRows(_tables(located, dataset, layout), layout)
    if not len(rows):
        raise StageError(_empty(located.paths[0] if isinstance(located, Files) else dataset.label))
    return rows


def open_source(source: Source | Mixture, layout: Schema, seed: int, *, shuffle: bool = True) -> Draw:
    """Return a function from an admission number to the name of its source and its values."""
    if isinstance(source, Mixture):
        whose = turns([weight for _, weight in source.parts])
        draws = [
            open_source(part, layout, (seed + k * _NEXT_SEED) % 2**64, shuffle=shuffle)
            for k, (part, _) in enumerate(source.parts)
        ]

        def mixed(admission: int) -> tuple[str, tuple]:
            k, draw = whose.at(admission)
            return draws[k](draw)

        return mixed
    name = label(source)
    if isinstance(source, Generated):
        return lambda admission: (name, layout.read(_pair(*source.train(admission, order=seed)), name))
    rows = open_rows(source, layout)
    at = order(len(rows), seed, shuffle=shuffle)
    return lambda admission: (name, rows[at(admission)])


def order(count: int, seed: int, *, shuffle: bool = True) -> Callable[[int], int]:
    """Return a function from a draw to its row: a new permutation per epoch, or file order without `shuffle`."""
    if not shuffle:
        return lambda draw: draw % count
    from ops.random import permutation

    epoch_order = lru_cache(maxsize=2)(lambda epoch: permutation(seed, epoch, count))

    def at(draw: int) -> int:
        epoch, position = divmod(draw, count)
        return int(epoch_order(epoch)[position])

    return at


def source_problems(source: Source | Mixture, layout: Schema, where: str) -> Iterator[Problem]:
    """Check the first 1,000 rows, without network access; `where` is the line that names the source."""
    if isinstance(source, Mixture):
        for part, _ in source.parts:
            yield from source_problems(part, layout, where)
        return
    try:
        if isinstance(source, Generated):
            for column in layout.columns:
                if column not in _pair("", ""):
                    yield Problem(
                        where=where,
                        what=f"a Generated task has no column {column!r}",
                        why="its columns are 'prompt' and 'answer', and each data set can name its own",
                        fix='write Dataset("train.jsonl", prompt="question") for data sets with other names',
                    )
            return
        dataset = source if isinstance(source, Dataset) else Dataset(source)
        if layout.answer is None and dataset.answer is not None:
            yield Problem(
                where=where,
                what=f"{dataset.label!r} has answer={dataset.answer!r}, and Prompts has answer=None",
                why="all rows have the same fields",
                fix="leave out answer= in both, or in neither",
            )
        layout = layout.of(dataset)
        located = locate(dataset, where)
        if isinstance(located, Files):
            yield from _file_problems(located.paths, layout)
        elif isinstance(located, SavedDataset):
            from stages.sources.arrow import saved_problems

            yield from saved_problems(located, layout)
    except StageError as error:
        yield from error.problems


def checked_rows(
    source: object, layout: Callable[[Dataset], Schema]
) -> Iterator[tuple[Dataset, str, Mapping[str, Any]]]:
    """Yield (its data set, file and row, the row) of the rows of files that a check reads, as far as they can be read.
    `layout` has the columns of a data set that are wanted."""
    if isinstance(source, Mixture):
        for part, _ in source.parts:
            yield from checked_rows(part, layout)
        return
    if not isinstance(source, str | Path | Dataset):
        return
    with suppress(StageError, *BROKEN, TypeError):
        dataset = source if isinstance(source, Dataset) else Dataset(source)
        located = locate(dataset, "")
        paths = located.paths if isinstance(located, Files) else ()
        limit = -(-CHECKED_ROWS // max(1, len(paths)))
        for path in paths:
            for where, row in islice(_first_rows(path, layout(dataset), limit), limit):
                with suppress(StageError):
                    yield dataset, where, jsonl.parse(row, where) if isinstance(row, bytes) else row


def columns_read(source: Source | Mixture, layout: Schema) -> list[str]:
    """Every column that is read, once each."""
    if isinstance(source, Mixture):
        read = [column for part, _ in source.parts for column in columns_read(part, layout)]
    else:
        read = list((layout.of(source) if isinstance(source, Dataset) else layout).columns)
    return list(dict.fromkeys(read))


def _tables(located: Files | SavedDataset | Hub, dataset: Dataset, layout: Schema) -> list[Table]:
    if isinstance(located, Files) and located.paths[0].suffix != ".parquet":
        return [jsonl.JsonlTable(path, layout) for path in located.paths]
    from stages.sources import arrow

    if isinstance(located, Files):
        return [arrow.parquet(path, layout) for path in located.paths]
    return [arrow.saved(located, layout) if isinstance(located, SavedDataset) else arrow.hub(located, dataset, layout)]


def _file_problems(paths: Sequence[Path], layout: Schema) -> Iterator[Problem]:
    limit = -(-(CHECKED_ARRAYS if layout.arrays else CHECKED_ROWS) // len(paths))
    good: list[tuple] = []
    problems: list[Problem] = []
    for path in paths:
        for number, (where, row) in enumerate(islice(_first_rows(path, layout, limit), limit)):
            try:
                found = jsonl.parse(row, where) if isinstance(row, bytes) else row
            except StageError as error:
                problems += error.problems
                if number == 0:  # the file has another format, so no line of it is valid
                    break
                continue
            try:
                good.append(layout.read(found, where, folder=path.parent))
            except StageError as error:
                problems += error.problems
    checked, name = len(good) + len(problems), str(paths[0]) if len(paths) == 1 else f"{paths[0]} and others"
    yield from problems[:_SHOWN]
    if len(problems) > _SHOWN:
        yield Problem(
            where=name,
            what=f"{len(problems) - _SHOWN} more of the first {checked} lines are invalid",
            why=f"only the first {_SHOWN} are shown",
            fix="correct those first, since the others are probably alike",
        )
    if not checked:
        yield _empty(paths[0])
    elif not problems and not layout.arrays and (repeats := checked - len(set(good))):
        yield Problem(
            where=name,
            what=f"{repeats} of the first {checked} rows repeat an earlier one",
            why="a row that occurs twice is drawn twice per epoch",
            fix="remove the repeats, unless you want them",
            warning=True,
        )


def _first_rows(path: Path, layout: Schema, limit: int) -> Iterator[tuple[str, Any]]:
    """Yield (file and row, the row or the line that holds it), starting with the first."""
    if path.suffix != ".parquet":
        return jsonl.first_lines(path)
    from stages.sources import arrow

    return arrow.first_rows(path, layout, limit)


def _pair(prompt: str, answer: str) -> dict[str, str]:
    return {"prompt": prompt, "answer": answer}


def _empty(name: str | Path) -> Problem:
    return Problem(
        where=str(name),
        what="the file has no rows",
        why="there is no prompt to draw",
        fix='write one JSON object per line, such as {"prompt": "1+1=", "answer": "2"}',
    )
