"""The interface of everything that runs tasks: `local` in this process, `ray` on actors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from pipeline.data_plane import DataPlane
from pipeline.declare.graph import Graph
from pipeline.declare.handle import KVBatchMeta, groups_of
from pipeline.declare.task import ServerAddress, Task
from pipeline.errors import Problem, StageError
from pipeline.executors.inputs import SHARD
from pipeline.executors.outputs import TaskResult
from pipeline.executors.worker import WorkerSettings
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record.trace import Placed

LOOPBACK = "127.0.0.1"


class Executor(Protocol):
    """Starts workers, submits tasks to them and reports their results. One instance per run."""

    name: str
    plane: DataPlane

    def start(self, graph: Graph, plan: Plan, settings: WorkerSettings, restore: Path | None) -> list[Placed]:
        """Start the data plane and the workers, and restore their state from the checkpoint `restore`.

        Returns where each worker runs.
        Raises SluiceError if a worker cannot be set up.
        """

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        """Start a task on its replica, or on all workers of its group. The scheduler guarantees that they are free."""

    def wait(self, timeout_s: float) -> list[TaskResult]:
        """Return reports as they arrive; a stream sends several. Empty if none arrives within `timeout_s`."""

    def cancel(self, task: Task, groups: Sequence[int]) -> None:
        """Ask a running stream to cancel these groups. It acknowledges each one, canceled or finished."""

    def hold(self, folder: Path) -> None:
        """Have every worker copy its state, after the tasks submitted so far, and begin to write it below `folder`.
        Blocks until the state may change; without memory for a copy, until it is written."""

    def saved(self, folder: Path) -> Mapping[str, Mapping[str, int]]:
        """Wait until everything held is written. Returns for each worker the size of each file that it then sees, by
        its path below `folder`. May be called from a thread."""

    def saved_bytes(self) -> int:
        """Return how many bytes `hold` will write, as far as the stages know."""

    def cleared(self, rows: Sequence[str]) -> None:
        """Rows were cleared from the data plane: workers drop their copies before their next task."""

    def close(self) -> None:
        """Stop the workers and the data plane. Idempotent; also valid after a failed start."""


def shards(stage: PlannedStage, task: Task, meta: KVBatchMeta, replicas: int) -> list[KVBatchMeta]:
    """Return one handle per data-parallel replica: its samples, and their microbatches.

    Batches are sharded here and nowhere else. Raises StageError if a batch cannot be sharded.
    """
    assert stage.sharding is not None
    try:
        made = stage.sharding.shards(meta.lengths, replicas, tuple(groups_of(meta.keys).values()))
    except ValueError as error:
        raise StageError(
            Problem(
                where=stage.where,
                what=f"the batch of stage {stage.name!r} at step {task.step + 1} cannot be divided: {error}",
                why="every data-parallel worker gets a share, in microbatches within the budget",
                fix="use a larger budget, shorter responses, or other numbers of workers and minibatches",
            )
        ) from error
    handles = []
    for shard in made:
        part = meta if shard.index == tuple(range(len(meta))) else meta.reorder(shard.index)
        handles.append(msgspec.structs.replace(part, extra_info=part.extra_info | {SHARD: msgspec.to_builtins(shard)}))
    return handles


def by_stage(found: Iterable[Mapping[str, ServerAddress]]) -> dict[str, list[ServerAddress]]:
    """Return by stage where it is served, as each worker that serves reports it."""
    servers: dict[str, list[ServerAddress]] = {}
    for addresses in found:
        for name, address in addresses.items():
            servers.setdefault(name, []).append(address)
    return servers


def merged(task: Task, results: Sequence[TaskResult]) -> TaskResult:
    """Merge the reports of all ranks of a task: the first error, all handles, the mean of the metrics.

    Metrics are weighted by samples. It is an error if ranks hold different weights after a refit.
    """
    if len(results) == 1:
        return results[0]
    samples = sum(result.samples for result in results)
    whole = TaskResult(task=task, finished=task.groups, samples=samples)
    acknowledged = {result.weights for result in results if result.weights}
    for result in results:
        whole.handles += result.handles
        whole.sizes += result.sizes
        whole.counts = dict(Counter(whole.counts) + Counter(result.counts))
        whole.events += result.events
        whole.dropped |= result.dropped
        whole.oldest |= result.oldest
        whole.error = whole.error or result.error
        share = result.samples / samples if samples else 1 / len(results)
        for name, value in result.metrics.items():
            whole.metrics[name] = whole.metrics.get(name, 0.0) + share * value
    if len(acknowledged) > 1 and not whole.error:
        message = ", ".join(f"version {version} {sha256[:12]}" for version, sha256 in sorted(acknowledged))
        whole.error = StageError(
            Problem(
                where=f"stage {task.stage!r}, step {task.step + 1}",
                what=f"its workers acknowledge different weights: {message}",
                why="all workers of a group hold the same model",
                fix="resume the run; if it happens again, the transfer is broken",
            )
        )
    whole.weights = next(iter(acknowledged), None)
    return whole
