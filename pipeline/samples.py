"""Keeps the texts and numbers of some samples of each step in the run directory. Every plan adds it as `samples`.

It reads the fields that hold one value a sample. It keeps the first `keep` groups of a step, and the groups with the
lowest and the highest mean reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.columns import Columns
from pipeline.fields import Field
from pipeline.meta import sample_key
from pipeline.rundir import RunDir
from pipeline.stage import Per, Stage, StageContext, Task


@dataclass(frozen=True)
class KeepSamples(Stage):
    """One JSON line a sample in `samples/step_NNNNNN.jsonl`."""

    fields: tuple[Field, ...]
    keep: int
    name: str = "samples"
    per: Per = "batch"

    @property
    def reads(self) -> Sequence[Field]:  # type: ignore[override]
        return self.fields

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Columns]:
        run_dir = RunDir(context.run_dir) if context.run_dir else None

        def run(columns: Columns, task: Task) -> Columns:
            if run_dir and self.keep > 0 and columns:
                rows = _rows(columns, task, context.group_size, self.keep)
                path = run_dir.samples(task.step)
                path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
            return {}

        return run


def _rows(columns: Columns, task: Task, group_size: int, count: int) -> list[dict[str, Any]]:
    values = {name: column if isinstance(column, list) else column.tolist() for name, column in columns.items()}  # type: ignore[union-attr]
    kept = set(range(min(count, len(task.groups))))
    if "reward" in values:
        rewards = values["reward"]
        totals = [sum(rewards[g * group_size : (g + 1) * group_size]) for g in range(len(task.groups))]
        kept |= {totals.index(min(totals)), totals.index(max(totals))}
    return [
        {"step": task.step, "key": sample_key(task.groups[g], i), "version": task.version}
        | {name: column[g * group_size + i] for name, column in values.items()}
        for g in sorted(kept)
        for i in range(group_size)
    ]
