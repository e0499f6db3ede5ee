"""Reads the samples that a run keeps in its directory as one TensorDict. Loads torch and tensordict when called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.data_plane.tensordicts import as_tensordict
from pipeline.declare.columns import Column, Ragged
from pipeline.errors import GraphError, Problem
from pipeline.rundir import RunDir

if TYPE_CHECKING:
    from tensordict import TensorDict


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
    return as_tensordict({name: _column([row[name] for row in rows]) for name in shared}, len(rows))


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in path.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise GraphError(
            Problem(
                where=str(path),
                what=f"a line is not a sample: {error}",
                why="each line is a JSON object with the fields of a sample",
                fix="delete the broken line",
            )
        ) from error


def _column(values: Sequence[Any]) -> Column:
    """Return a column from the plain values of its samples. Whole numbers become int64, other numbers float32."""
    import torch

    if isinstance(values[0], str):
        return list(values)
    if not isinstance(values[0], list):
        return torch.tensor(values)
    rows = [torch.tensor(value) for value in values]
    filled = next((row for row in rows if len(row)), rows[0])
    return Ragged.of([row.to(filled.dtype).reshape(len(row), *filled.shape[1:]) for row in rows])
