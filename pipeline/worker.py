"""One process of a worker group: it holds the runners of its stages and turns handles into handles.

It fetches the columns that a stage reads, calls the runner, puts what the runner returns, and reports spans. It knows
no Ray: the executors wrap it. Whatever user code raises leaves here as a `StageError`, its inputs saved for `--replay`.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipeline import replay, trace
from pipeline.columns import Columns, size_bytes
from pipeline.data_plane import DataPlane
from pipeline.errors import Problem, SluiceError, StageError, user_error
from pipeline.graph import WorkerGroup
from pipeline.meta import KVBatchMeta, groups_of, keys_of
from pipeline.plan import sample_fields
from pipeline.ranks import Layout, Ranks, open_store, reach_store
from pipeline.rundir import RunDir
from pipeline.sharding import Shard
from pipeline.stage import Output, Rendezvous, Stage, StageContext, Task

SHARD = "shard"  # the entry of a handle's extra_info that says how its samples are cut


@dataclass(frozen=True)
class WorkerSettings:
    """What every worker of a run is told."""

    partition: str
    group_size: int
    steps: int
    seed: int
    run_dir: Path | None


class TaskResult(msgspec.Struct, kw_only=True):
    """What a worker reports. `error` is set and the rest is partial where the task failed.

    `dropped` says for groups, by admission number, why a gate dropped them.
    """

    task: Task
    handles: list[KVBatchMeta] = []
    samples: int = 0
    metrics: dict[str, float] = {}
    weights: tuple[int, str] | None = None
    dropped: dict[int, str] = {}
    events: list[trace.Got | trace.Put | trace.Ran] = []
    error: Any = None


class Worker:
    """Rank `rank` of `group`. Call `join` where the group has several, then `setup` and `connect`, and `run` and
    `transfer` as tasks come."""

    def __init__(
        self,
        group: WorkerGroup,
        rank: int,
        stages: Sequence[Stage],
        all_stages: Sequence[Stage],
        settings: WorkerSettings,
    ) -> None:
        self.group, self.rank, self.settings = group, rank, settings
        self.ranks = Ranks()
        self.stages = {stage.name: stage for stage in stages}
        self._all_stages = all_stages
        self._runners: dict[str, Any] = {}
        self._plane: DataPlane | None = None
        self._store: Any = None

    def meeting_point(self, host: str, deadline_s: float) -> int:
        """Open the store at which the ranks of this group meet; its port on `host`. For rank 0, before `join`."""
        self._store = open_store(host, self.group.workers, deadline_s=deadline_s)
        return self._store.port

    def join(self, host: str, port: int, deadline_s: float) -> None:
        """Meet the other ranks of the group. Exchanges among them end after `deadline_s` with an error."""
        store = self._store
        if store is None:
            store = reach_store(host, port, self.group.workers, deadline_s=deadline_s)
        device = "cuda" if self.group.gpus else "cpu"
        layout, fetch = Layout.of(self.group), self.group.fetch
        self.ranks = Ranks.join(layout, self.rank, store, device=device, deadline_s=deadline_s, fetch=fetch)

    def setup(self) -> SluiceError | None:
        """Build the runners, which loads models."""
        context = StageContext(
            group=self.group,
            rank=self.rank,
            seed=self.settings.seed,
            group_size=self.settings.group_size,
            run_dir=self.settings.run_dir,
            shared={},
            steps=self.settings.steps,
            ranks=self.ranks,
        )
        for stage in self.stages.values():
            try:
                self._runners[stage.name] = stage.setup(context)
            except Exception as error:  # noqa: BLE001 - user code enters here
                self._log(error)
                return user_error(error, stage=stage.name, where=str(stage.location), when="setup failed")
        return None

    def connect(self, plane: DataPlane) -> None:
        """Join the data plane and declare the graph's partition."""
        self._plane = plane
        register(plane, self.settings.partition, self._all_stages)

    def run(self, task: Task, meta: KVBatchMeta | None, cleared: Sequence[str] = ()) -> TaskResult:
        """A map or stream task on the samples of `meta`; `cleared` rows are forgotten first."""
        assert self._plane is not None, "connect() comes before run()"
        stage, result, start_s = self.stages[task.stage], TaskResult(task=task), time.monotonic()
        columns: Columns = {}
        try:
            if cleared:
                self._plane.evict(cleared)
            fields = [field.name for field in stage.reads if not field.per_step]
            if meta is not None and SHARD in meta.extra_info:
                task = self._sharded(stage, task, msgspec.convert(meta.extra_info[SHARD], Shard))
            if meta is not None and fields:
                columns = self.ranks.share(lambda: self._get(stage, task, meta, fields, result))
            keys = meta.keys if meta is not None else self._mint(task)
            result.samples = len(keys)
            for output in self._outputs(stage, task, columns):
                self._keep(stage, task, keys, output, result)
        except Exception as error:  # noqa: BLE001 - user code enters here
            result.error = self._failed(stage, task, columns, error)
        self._span(task, result, start_s)
        return result

    def transfer(self, task: Task, rendezvous: Rendezvous) -> TaskResult:
        """One side of a transfer task."""
        stage, result, start_s = self.stages[task.stage], TaskResult(task=task), time.monotonic()
        try:
            output = _as_output(self._runners[stage.name](rendezvous, task))
            result.metrics = {_full(stage, name): value for name, value in output.metrics.items()}
            result.weights = output.weights
        except Exception as error:  # noqa: BLE001 - user code enters here
            result.error = self._failed(stage, task, {}, error)
        self._span(task, result, start_s)
        return result

    def save(self, folder: Path) -> list[str]:
        """Write the state of every runner that has one below `folder`; the names of those stages.

        The runner of a stage with sharding is called on every rank, which is what gathering needs, and writes on rank
        0; any other is called on rank 0 only.
        """
        names = [
            name
            for name, runner in self._runners.items()
            if hasattr(runner, "save") and (self.rank == 0 or self.stages[name].sharding)
        ]
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
            self._runners[name].save(folder / name)
        return names

    def restore(self, folder: Path) -> None:
        """The inverse of `save`."""
        for name, runner in self._runners.items():
            if hasattr(runner, "restore"):
                runner.restore(folder / name)

    def close(self) -> None:
        """Let go of the data plane and of the other ranks."""
        self.ranks.leave()
        if self._plane is not None:
            self._plane.close()

    def _sharded(self, stage: Stage, task: Task, shard: Shard) -> Task:
        """The task with its shard. Ranks that meet in it are asked first whether they have the same to do."""
        if self.ranks.connected and stage.sharding and stage.sharding.equal:
            pads = [[(part.prompt, part.response) for part in update.microbatches] for update in shard.updates]
            counts = [f"{len(pad)} microbatches {pad}" for pad in pads]
            self.ranks.agree(f"stage {stage.name!r}, step {task.step + 1}", f"update {', '.join(counts)}")
        return msgspec.structs.replace(task, shard=shard)

    def _mint(self, task: Task) -> tuple[str, ...]:
        return keys_of(task.groups, self.settings.group_size)

    def _get(self, stage: Stage, task: Task, meta: KVBatchMeta, fields: list[str], result: TaskResult) -> Columns:
        assert self._plane is not None
        start_s = time.monotonic()
        columns = self._plane.get(meta, fields, reader=stage.name)
        result.events.append(
            trace.Got(
                stage=stage.name,
                step=task.step,
                fields=tuple(fields),
                samples=len(meta),
                size_bytes=sum(map(size_bytes, columns.values())),
                start_s=start_s,
                end_s=time.monotonic(),
            )
        )
        return columns

    def _outputs(self, stage: Stage, task: Task, columns: Columns) -> Iterator[Output]:
        produced = self._runners[stage.name](columns, task)
        if stage.shape != "stream":
            yield _as_output(produced)
            return
        loop = asyncio.new_event_loop()
        try:
            while True:
                try:
                    yield _as_output(loop.run_until_complete(anext(produced)))
                except StopAsyncIteration:
                    return
        finally:
            loop.run_until_complete(produced.aclose())
            loop.close()

    def _keep(self, stage: Stage, task: Task, keys: tuple[str, ...], output: Output, result: TaskResult) -> None:
        """Put one output and add its metrics, weighted by samples."""
        assert self._plane is not None
        declared = {field.name for field in stage.writes if not field.per_step}
        if output.columns.keys() != declared:
            raise _wrong_columns(stage, declared, set(output.columns))
        index: Sequence[int] = range(len(keys)) if output.index is None else output.index
        if output.dropped:
            index = self._kept(stage, task, output, len(keys))
        result.dropped |= {task.groups[position]: reason for position, reason in output.dropped.items()}
        if declared and len(index) and self.ranks.leads:
            everything = output.index is None and not output.dropped
            chosen = keys if everything else tuple(keys[i] for i in index)
            start_s = time.monotonic()
            handle = self._plane.put(
                chosen,
                output.columns,
                partition=self.settings.partition,
                stage=stage.name,
                attempt=task.attempt,
                unit=stage.per,
            )
            result.handles.append(handle)
            result.events.append(
                trace.Put(
                    stage=stage.name,
                    step=task.step,
                    attempt=task.attempt,
                    fields=handle.fields,
                    groups=tuple(groups_of(chosen)),
                    samples=len(chosen),
                    size_bytes=sum(map(size_bytes, output.columns.values())),
                    start_s=start_s,
                    end_s=time.monotonic(),
                )
            )
        share = len(output.index) / len(keys) if output.index is not None else 1.0
        for name, value in output.metrics.items():
            full = _full(stage, name)
            result.metrics[full] = result.metrics.get(full, 0.0) + share * value
        result.weights = output.weights or result.weights

    def _kept(self, stage: Stage, task: Task, output: Output, samples: int) -> Sequence[int]:
        """The samples of the groups that an output does not drop."""
        if stage.gate is None or not output.dropped.keys() <= set(range(len(task.groups))):
            raise StageError(
                Problem(
                    where=str(stage.location),
                    what=f"stage {stage.name!r} drops groups {sorted(output.dropped)} of {len(task.groups)}",
                    why="a stage with a gate drops groups of its task, by position; no other stage drops any",
                    fix="set gate, or mend dropped",
                )
            )
        size = self.settings.group_size
        return [i for i in range(samples) if i // size not in output.dropped]

    def _span(self, task: Task, result: TaskResult, start_s: float) -> None:
        result.events.append(
            trace.Ran(
                stage=task.stage,
                step=task.step,
                attempt=task.attempt,
                group=self.group.name,
                worker=self.rank,
                groups=task.groups,
                start_s=start_s,
                end_s=time.monotonic(),
                metrics=result.metrics,
            )
        )

    def _failed(self, stage: Stage, task: Task, columns: Columns, error: Exception) -> SluiceError:
        if self.settings.run_dir:
            folder = RunDir(self.settings.run_dir).failure(task.step, stage.name, self.rank)
            replay.save_inputs(folder, task, columns)
        self._log(error)
        when = f"failed at step {task.step + 1}"
        return user_error(error, stage=stage.name, where=str(stage.location), when=when)

    def _log(self, error: Exception) -> None:
        """The traceback, for the run directory."""
        if self.settings.run_dir:
            with (RunDir(self.settings.run_dir).logs / f"{self.group.name}-{self.rank}.log").open("a") as file:
                traceback.print_exception(error, file=file)


def register(plane: DataPlane, partition: str, stages: Sequence[Stage]) -> None:
    """Declare the partition of a graph: its sample fields, and its stages as readers."""
    plane.register(partition, sample_fields(stages), [stage.name for stage in stages])


def _full(stage: Stage, metric: str) -> str:
    return metric if "/" in metric else f"{stage.name}/{metric}"


def _as_output(produced: Output | Columns | None) -> Output:
    return produced if isinstance(produced, Output) else Output(columns=produced or {})


def _wrong_columns(stage: Stage, declared: set[str], got: set[str]) -> StageError:
    parts = [f"lacks {', '.join(sorted(declared - got))}"] if declared - got else []
    parts += [f"adds {', '.join(sorted(got - declared))}"] if got - declared else []
    return StageError(
        Problem(
            where=str(stage.location),
            what=f"what stage {stage.name!r} returned {' and '.join(parts)}",
            why="a stage returns exactly the columns that it declares in writes",
            fix="mend writes, or what the runner returns",
        )
    )
