"""Reads the samples that a run keeps in its directory as one TensorDict. Loads torch and tensordict when called."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.data_plane.tensordicts import as_tensordict
from pipeline.declare.columns import Column, Ragged
from pipeline.errors import GraphError, Problem
from pipeline.reading import decode, readable
from pipeline.rundir import RunDir

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

_FX = logging.getLogger("torch.fx._symbolic_trace")


def kept_samples(run: Path) -> TensorDict:
    """Return the kept samples of all steps, in order, with `step`, `key` and `version` beside the fields that all of
    them have. Per-token floats have the three decimal places with which the run keeps them.

    Raises GraphError if the run has kept none, or a line of them cannot be read.
    """
    run_dir = RunDir(run)
    rows = [row for step in run_dir.sampled_steps() for row in _rows(run_dir.samples(step))]
    if not rows:
        raise GraphError(
            Problem(
                where=str(run),
                what="it has no kept samples",
                why="a run writes those of the first Schedule(keep_groups=...) groups of a step to its folder samples",
                fix="name the directory of a run with keep_groups of 1 or more that has finished a step",
            )
        )
    shared = [name for name in rows[0] if all(name in row for row in rows)]
    columns: dict[str, Column] = {}
    for name in shared:
        why, fix = "a field has values of one type and shape in all samples", "delete the lines that have another one"
        with readable(
            run_dir.samples(0).parent, GraphError, why=why, fix=fix, also=(TypeError, RuntimeError, OverflowError)
        ):
            columns[name] = _column([row[name] for row in rows])
    with _untold():
        return as_tensordict(columns, len(rows))


@contextmanager
def _untold() -> Iterator[None]:
    """Keep torch, in the context, from printing a warning about a call of its own: making a nested tensor asks
    is_fx_tracing."""

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("is_fx_tracing will return true")

    _FX.addFilter(other)
    try:
        yield
    finally:
        _FX.removeFilter(other)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows, why = [], "each line is a JSON object with the fields of a sample"
    with readable(path, GraphError, why=why, fix="restore the file, or remove it"):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        with readable(f"{path}:{number}", GraphError, why=why, fix="delete the broken line"):
            rows.append(decode(line, dict[str, Any]))
    return rows


def _column(values: Sequence[Any]) -> Column:
    """Return a column from the plain values of its samples. Whole numbers become int64, other numbers float32, or
    float64 if one of them is beyond its range."""
    import torch

    if isinstance(values[0], str):
        return list(values)
    if not isinstance(values[0], list):
        return _numbers(values)
    rows = [_numbers(value) for value in values]
    filled = max(rows, key=lambda row: (len(row) > 0, row.dtype == torch.float64))  # the first of the best
    return Ragged.of([row.to(filled.dtype).reshape(len(row), *filled.shape[1:]) for row in rows])


def _numbers(values: Sequence[Any]) -> torch.Tensor:
    import torch

    narrow = torch.tensor(values)
    return torch.tensor(values, dtype=torch.float64) if narrow.is_floating_point() and narrow.isinf().any() else narrow
