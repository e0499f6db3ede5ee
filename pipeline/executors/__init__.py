"""Who runs tasks: the interface. `local` runs them in this process, `ray` on actors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from pipeline.data_plane import DataPlane
from pipeline.graph import Graph
from pipeline.meta import KVBatchMeta
from pipeline.plan import Plan
from pipeline.stage import Task
from pipeline.trace import Placed
from pipeline.worker import TaskResult, WorkerSettings


class Executor(Protocol):
    """Starts workers, hands them tasks, reports what they finished. One instance a run."""

    name: str
    plane: DataPlane

    def start(self, graph: Graph, plan: Plan, settings: WorkerSettings, restore: Path | None) -> list[Placed]:
        """Bring up data plane and workers, and give them their state back from the checkpoint `restore`.

        Returns where each worker runs.
        Raises SluiceError where a worker cannot be set up.
        """

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        """Queue a task. Tasks of one worker run in the order of submission."""

    def wait(self, timeout_s: float) -> list[TaskResult]:
        """Results as they come; an empty list when none came within `timeout_s`."""

    def save(self, folder: Path) -> None:
        """Have every worker write its state below `folder`, behind the tasks submitted so far; returns when done."""

    def cleared(self, rows: Sequence[str]) -> None:
        """Rows have left the data plane: workers forget them before their next task."""

    def close(self) -> None:
        """End workers and data plane. Idempotent; also after a failed start."""


def parts(task: Task, workers: int, per: str) -> list[Task]:
    """A task divided over the workers of its group, whole groups each; a `per` batch task goes to the first whole."""
    if workers == 1 or per == "batch" or len(task.groups) < 2:
        return [task]
    count = min(workers, len(task.groups))
    edges = [len(task.groups) * i // count for i in range(count + 1)]
    return [
        Task(stage=task.stage, step=task.step, groups=task.groups[a:b], attempt=task.attempt, version=task.version)
        for a, b in pairwise(edges)
    ]
