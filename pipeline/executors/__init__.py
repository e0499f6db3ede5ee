"""Who runs tasks: the interface. `local` runs them in this process, `ray` on actors, `simulated` on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from pipeline.data_plane import DataPlane
from pipeline.declare.graph import Graph
from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.task import Task
from pipeline.errors import Problem, StageError
from pipeline.executors.worker import SHARD, TaskResult, WorkerSettings
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record.trace import Placed


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
        """Start a task on its replica, or on all workers of its group, which the scheduler knows to be free for it."""

    def wait(self, timeout_s: float) -> list[TaskResult]:
        """Reports as they come, several of a stream; an empty list when none came within `timeout_s`."""

    def cancel(self, task: Task, groups: Sequence[int]) -> None:
        """Have a running stream give up these groups. It acknowledges them, given up or finished."""

    def save(self, folder: Path) -> None:
        """Have every worker write its state below `folder`, behind the tasks submitted so far; returns when done."""

    def cleared(self, rows: Sequence[str]) -> None:
        """Rows have left the data plane: workers forget them before their next task."""

    def close(self) -> None:
        """End workers and data plane. Idempotent; also after a failed start."""


def shards(stage: PlannedStage, task: Task, meta: KVBatchMeta, replicas: int) -> list[KVBatchMeta]:
    """The handle of each data-parallel replica: its samples, and with them how it cuts them into microbatches.

    This is the one place where a batch is divided. Raises StageError where it cannot be.
    """
    assert stage.sharding is not None
    try:
        made = stage.sharding.shards(meta.lengths, replicas)
    except ValueError as error:
        raise StageError(
            Problem(
                where=stage.where,
                what=f"the batch of stage {stage.name!r} at step {task.step + 1} cannot be divided: {error}",
                why="every data-parallel worker gets a share, in microbatches within the budget",
                fix="a larger budget, shorter responses, or other numbers of workers and minibatches",
            )
        ) from error
    handles = []
    for shard in made:
        part = meta if shard.index == tuple(range(len(meta))) else meta.reorder(shard.index)
        handles.append(msgspec.structs.replace(part, extra_info=part.extra_info | {SHARD: msgspec.to_builtins(shard)}))
    return handles


def merged(task: Task, results: Sequence[TaskResult]) -> TaskResult:
    """What several ranks report of one task, as one result: the first error, all handles, the mean of metrics.

    Metrics are weighted by samples. A refit that leaves the ranks with different weights is an error.
    """
    if len(results) == 1:
        return results[0]
    samples = sum(result.samples for result in results)
    whole = TaskResult(task=task, finished=task.groups, samples=samples)
    acknowledged = {result.weights for result in results if result.weights}
    for result in results:
        whole.handles += result.handles
        whole.events += result.events
        whole.dropped |= result.dropped
        whole.oldest |= result.oldest
        whole.error = whole.error or result.error
        share = result.samples / samples if samples else 1 / len(results)
        for name, value in result.metrics.items():
            whole.metrics[name] = whole.metrics.get(name, 0.0) + share * value
    if len(acknowledged) > 1 and not whole.error:
        told = ", ".join(f"version {version} {sha256[:12]}" for version, sha256 in sorted(acknowledged))
        whole.error = StageError(
            Problem(
                where=f"stage {task.stage!r}, step {task.step + 1}",
                what=f"its workers acknowledge different weights: {told}",
                why="all workers of a group hold the same model",
                fix="resume from the last checkpoint; if it comes again, the transfer is broken",
            )
        )
    whole.weights = next(iter(acknowledged), None)
    return whole
