"""Rows of Arrow tables: Parquet files, and data sets of the Hugging Face package `datasets`.

Knows the formats; a `Schema` selects the columns, and no others are read. A Parquet file is held in memory as Arrow;
what `datasets` saved or cached is memory-mapped, so it may be larger than memory. Loads both packages on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline import StageError
from pipeline.errors import Problem
from pipeline.reading import check_files, decode, readable
from stages.sources.dataset import Dataset, Hub, SavedDataset, split_choice
from stages.sources.schema import Schema, missing

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pyarrow as pa

_AT_ONCE = 1000  # rows checked at a time


class _Info(msgspec.Struct):
    """The part of dataset_info.json that names the columns."""

    features: dict[str, Any] | None = None


class ArrowTable:
    """The rows of one table, by number. Raises StageError with the row's number if a row is invalid.

    `cut(start, stop)` returns these rows as a table; `name` is for messages.
    """

    def __init__(
        self, name: str, count: int, cut: Callable[[int, int], pa.Table], layout: Schema, folder: Path | None = None
    ) -> None:
        self.name, self.folder, self._count, self._cut = name, folder or Path(), count, cut
        self._arrays = layout.arrays
        for start in range(0, count, _AT_ONCE):
            with _intact(name):
                piece = cut(start, min(start + _AT_ONCE, count))
                piece.validate(full=True)  # Arrow follows wrong offsets out of its memory
                rows = _texts(piece, layout)
            for i, row in enumerate(rows):
                layout.read(row, self.where(start + i), arrays=False)

    def __len__(self) -> int:
        return self._count

    def row(self, index: int, where: str) -> dict[str, Any]:
        """Row `index`, counted from 0."""
        return _row(self._cut(index, index + 1), self._arrays)

    def where(self, index: int) -> str:
        """Name and number of a row, counted from 0."""
        return f"{self.name}[{index}]"


def parquet(path: Path, layout: Schema) -> ArrowTable:
    """The rows of a Parquet file. Raises StageError if it is not one, lacks a column, or has an invalid row."""
    import pyarrow.parquet as pq

    names = _parquet_columns(path, layout)
    with _intact(path), pq.ParquetFile(path, memory_map=True) as file:
        table = file.read(columns=names)
    return ArrowTable(
        str(path), len(table), lambda start, stop: table.slice(start, stop - start), layout, folder=path.parent
    )


def first_rows(path: Path, layout: Schema, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and row, the row) for the first `count` rows of a Parquet file."""
    import pyarrow.parquet as pq

    names = _parquet_columns(path, layout)
    with _intact(path), pq.ParquetFile(path) as file:
        batch = next(file.iter_batches(batch_size=count, columns=names), None)
    if batch is not None:
        import pyarrow as pa

        table = pa.Table.from_batches([batch])
        for i in range(len(table)):
            yield f"{path}[{i}]", _row(table.slice(i, 1), layout.arrays)


def _intact(place: Path | str) -> AbstractContextManager[None]:
    """Turn the errors of reading damaged rows into a StageError. Those of Arrow are ValueErrors, OSErrors or others."""
    import pyarrow as pa

    also = (pa.ArrowException, LookupError, TypeError, OverflowError)
    return readable(place, StageError, why="its rows are read before the first step", fix="write it again", also=also)


def saved(located: SavedDataset, layout: Schema) -> ArrowTable:
    """The rows of a folder written by `save_to_disk`."""
    from datasets import load_from_disk

    with _intact(located.folder):
        for folder in {located.folder, located.folder / (located.split or "")}:
            check_files(folder)
    loaded = _loaded(str(located.folder), lambda: load_from_disk(str(located.folder)))
    parts = loaded if isinstance(loaded, dict) else {None: loaded}
    if located.split not in parts:  # dataset_dict.json and the folders differ
        what, why, fix = split_choice(str(located.folder), located.split, [str(name) for name in parts])
        raise StageError(Problem(where=str(located.folder), what=what, why=why, fix=fix))
    return _table(str(located.folder), parts[located.split], layout)


def hub(located: Hub, dataset: Dataset, layout: Schema) -> ArrowTable:
    """The rows of a hub data set, downloaded if the cache does not have it."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    name = located.name
    loaded = _loaded(name, lambda: load_dataset(name, dataset.config, split=dataset.split, revision=dataset.revision))
    if isinstance(loaded, dict):  # no split was given
        if len(loaded) > 1:
            what, why, fix = split_choice(name, None, list(loaded))
            raise StageError(Problem(where=name, what=what, why=why, fix=fix))
        loaded = next(iter(loaded.values()))
    return _table(name, loaded, layout)


def saved_problems(located: SavedDataset, layout: Schema) -> Iterator[Problem]:
    """Report columns that the folder's description lacks, without loading any data."""
    folder = located.folder / (located.split or "")
    info = folder / "dataset_info.json"
    features = None
    if info.is_file():
        with readable(info, StageError, why="save_to_disk of `datasets` wrote it", fix="save the data set again"):
            features = decode(info.read_bytes(), _Info).features
    features = features or {}
    for column in layout.columns if features else ():
        if column not in features and column.partition(".")[0] not in features:
            yield missing(str(folder), column, list(features), "the data set has")


def _loaded(name: str, load: Callable[[], Any]) -> Any:
    import pyarrow as pa
    from datasets.exceptions import DatasetsError

    of_packages = (DatasetsError, pa.ArrowException)
    try:
        return load()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, *of_packages) as error:
        raise StageError(
            Problem(
                where=name,
                what=f"the data set cannot be loaded: {' '.join(str(error).split())[:300]}",
                why="its rows are read before the first step",
                fix="correct the name, config or split; without a network, name a folder instead",
            )
        ) from error


def _table(name: str, loaded: datasets.Dataset, layout: Schema) -> ArrowTable:
    roots = _roots(name, loaded.features.arrow_schema, layout)
    cut = loaded.select_columns(roots).with_format("arrow")  # as stored: images stay encoded
    return ArrowTable(name, len(loaded), lambda start, stop: cut[start:stop], layout)


def _parquet_columns(path: Path, layout: Schema) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StageError(
            Problem(
                where=str(path),
                what=f"this is not a Parquet file ({' '.join(str(error).split())[:80]})",
                why="its name ends in .parquet",
                fix="write it again, or rename it if it is a JSONL file",
            )
        ) from error
    _roots(str(path), schema, layout)
    return list(layout.columns)


def _roots(name: str, schema: pa.Schema, layout: Schema) -> list[str]:
    """The outermost columns that the layout reads. Raises StageError for a missing column."""
    roots: dict[str, None] = {}
    for column in layout.columns:
        root, *inner = [column] if column in schema.names else column.split(".")
        if root not in schema.names or not _reaches(schema.field(root).type, inner):
            raise StageError(missing(name, column, _names(schema, nested="." in column), "the data set has"))
        roots[root] = None
    return list(roots)


def _reaches(kind: pa.DataType, path: Sequence[str]) -> bool:
    for part in path:
        if part not in _inner_names(kind):
            return False
        kind = kind.field(part).type
    return True


def _names(schema: pa.Schema, *, nested: bool) -> list[str]:
    """The column names; with `nested`, those of the columns inside them."""
    if not nested:
        return schema.names
    return [name for f in schema for name in ([f"{f.name}.{i}" for i in _inner_names(f.type)] or [f.name])]


def _inner_names(kind: pa.DataType) -> list[str]:
    import pyarrow as pa

    return [kind.field(i).name for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def _texts(table: pa.Table, layout: Schema) -> list[dict[str, Any]]:
    """The rows without array columns, which may be large."""
    kept = [name for name in table.column_names if name not in layout.arrays]
    return table.select(kept).to_pylist() if kept else [{}] * len(table)


def _row(table: pa.Table, arrays: frozenset[str]) -> dict[str, Any]:
    """The only row of a table: nested numbers in the columns `arrays` as numpy, the rest as Python."""
    return {
        name: _value(table.column(name)[0]) if name in arrays else table.column(name)[0].as_py()
        for name in table.column_names
    }


def _value(scalar: pa.Scalar) -> Any:
    numbers = _numbers(scalar.values) if _is_list(scalar.type) and scalar.is_valid else None
    return scalar.as_py() if numbers is None else numbers


def _numbers(column: pa.Array) -> np.ndarray | None:
    """A nested list with parts of equal length as an array; None for other columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if column.null_count:
        return None
    if _is_list(kind):
        widths = pc.unique(pc.list_value_length(column)).to_pylist()
        inner = _numbers(column.flatten()) if len(widths) == 1 else None
        return None if inner is None else inner.reshape(len(column), widths[0], *inner.shape[1:])
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return column.to_numpy(zero_copy_only=False) if number else None


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
