"""Keeps the texts and numbers of some samples of each step in the run directory. Every plan adds it as `samples`.

It reads the fields with one value per sample, and those that a stage `shows`, for `keep` groups of each step: the
first, those with the lowest and highest mean reward and the widest range of rewards, and then the next in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.declare.columns import Column, Columns, Ragged, plain_values
from pipeline.declare.fields import Field
from pipeline.declare.handle import sample_key
from pipeline.declare.stage import Stage
from pipeline.declare.task import Per, StageContext, Task
from pipeline.rundir import RunDir
from pipeline.writing import recording, replace

REWARD = "reward"
DIGITS = 3  # decimal places of kept per-token numbers


@dataclass(frozen=True)
class KeepSamples(Stage):
    """One JSON line per sample in `samples/step_NNNNNN.jsonl`."""

    fields: tuple[Field, ...]
    keep: int
    name: str = "samples"
    per: Per = "batch"

    @property
    def reads(self) -> Sequence[Field]:  # type: ignore[override]
        return self.fields

    @property
    def chooses(self) -> Sequence[Field]:
        """The fields by which it chooses groups: the reward, if that is a number; empty if it takes the first ones."""
        rewards = [field for field in self.fields if field.name == REWARD and field.dtype != "str"]
        return rewards if self.keep > 1 else []

    def choose(self, columns: Columns, group_size: int) -> Sequence[int]:
        """Return the positions of the groups to keep, from the columns of all samples of a batch."""
        rewards = columns[REWARD].double().reshape(-1, group_size)  # type: ignore[union-attr]
        means, widths = rewards.mean(1), rewards.amax(1) - rewards.amin(1)
        extremes = [int(means.argmin()), int(means.argmax()), int(widths.argmax())]
        return list(dict.fromkeys([0, *extremes, *range(len(rewards))]))[: self.keep]

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Columns]:
        run_dir = RunDir(context.run_dir) if context.run_dir else None

        def run(columns: Columns, task: Task) -> Columns:
            if run_dir and columns:
                rows = _rows(columns, task, context.group_size)
                path = run_dir.samples(task.step)
                with recording(path):
                    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
            return {}

        return run


def keep_vocabulary(run_dir: RunDir, pieces: Sequence[bytes]) -> None:
    """Write the bytes that each token adds to a text, for readers of the kept ids.

    The file is a JSON list by token id. In its strings, each character stands for one byte.
    """
    replace(run_dir.vocabulary, msgspec.json.encode([piece.decode("latin-1") for piece in pieces]))


def _values(column: Column) -> list[Any]:
    if isinstance(column, Ragged) and column.values.is_floating_point():
        return [[round(value, DIGITS) for value in row] for row in plain_values(column)]
    return plain_values(column)


def _rows(columns: Columns, task: Task, group_size: int) -> list[dict[str, Any]]:
    values = {name: _values(column) for name, column in columns.items()}
    count = min(map(len, values.values()))
    return [
        {"step": task.step, "key": sample_key(task.groups[n // group_size], n % group_size), "version": task.version}
        | {name: column[n] for name, column in values.items()}
        for n in range(count)
    ]
