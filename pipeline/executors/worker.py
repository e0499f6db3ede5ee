"""One process of a worker group. It holds the runners of its stages and turns handles into handles.

It fetches the columns that a stage reads, calls the runner, puts the returned columns, and reports spans. It knows no
Ray; the executors wrap it. Any exception of user code leaves here as a `StageError`, with its inputs saved for
`--replay`.
"""

from __future__ import annotations

import asyncio
import socket
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipeline.data_plane import DataPlane
from pipeline.data_plane.checks import check_kinds
from pipeline.data_plane.tensordicts import given
from pipeline.declare.abilities import Shows, stamped_by, stamps_of
from pipeline.declare.columns import Columns, group_bytes, in_order, size_bytes
from pipeline.declare.group import WorkerGroup
from pipeline.declare.handle import KVBatchMeta, groups_of, keys_of
from pipeline.declare.held import Closes, Saves, Sleeps
from pipeline.declare.ranks import RankLayout, Ranks, open_store, reach_store
from pipeline.declare.sharding import Shard
from pipeline.declare.stage import Stage
from pipeline.declare.task import Output, Rendezvous, StageContext, Task
from pipeline.errors import (
    CALLED,
    USERS,
    PeerLost,
    Problem,
    SluiceError,
    StageError,
    Unfit,
    is_users,
    message_of,
    user_error,
)
from pipeline.executors import replay, returned
from pipeline.executors.meter import Meter
from pipeline.executors.policy_versions import Versions, versions_of
from pipeline.executors.saving import Saving
from pipeline.forks import Original
from pipeline.plan.planner import sample_fields
from pipeline.plan.samples import KeepSamples, keep_vocabulary
from pipeline.record import trace
from pipeline.rundir import RunDir

SHARED_S = 10.0  # for a network file system to show what the driver wrote
SHARD = "shard"  # the key in a handle's extra_info for its microbatches


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of every worker of a run. `parts` are the plan's partitions, with their fields. `mark` is the text
    in the run directory by which a worker knows that it sees the driver's. `folders` are the folders from which the
    driver imports the user's modules, `in_turns` the groups that share GPUs with others."""

    partition: str
    parts: Mapping[str, tuple[str, ...]]
    group_size: int
    steps: int
    seed: int
    run_dir: Path | None
    mark: str = ""
    folders: tuple[str, ...] = ()
    in_turns: frozenset[str] = frozenset()


class TaskResult(msgspec.Struct, kw_only=True):
    """A worker's report on a task: all of it, or, for a stream, everything since the last report.

    counts     what the worker's data plane counted since its last report
    sizes      of each handle: the bytes of each field that it put, by group
    finished   finished groups, by admission number
    samples    the number of samples that the metrics average over
    dropped    dropped groups, with the gate's reason
    cancelled  canceled groups, with the length of their longest sample
    oldest     from a stage that stamps: the oldest token version of each finished group
    error      set if the task failed; the rest is then partial
    served     set if the report only says that this replica has the whole version; the transfer continues
    lost       set if the worker died and was replaced: unreported work is to be submitted again
    """

    task: Task
    handles: list[KVBatchMeta] = []
    sizes: list[dict[str, list[int]]] = []
    counts: dict[str, int] = {}
    finished: tuple[int, ...] = ()
    samples: int = 0
    metrics: dict[str, float] = {}
    weights: tuple[int, str] | None = None
    dropped: dict[int, str] = {}
    cancelled: dict[int, int] = {}
    oldest: dict[int, int] = {}
    events: list[trace.Got | trace.Put | trace.Ran | trace.Trained | trace.Placed | trace.Turned] = []
    error: Any = None
    served: int | None = None
    lost: str | None = None


class Worker:
    """Rank `rank` of `group`. Call `join` if the group has several ranks, then `setup` and `connect`, then `run`,
    `stream` and `transfer` for tasks."""

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
        self._streaming: set[int] = set()  # groups
        self._cancelled: set[int] = set()  # the canceled ones among those
        self._all_stages = all_stages
        self._stamps = stamps_of(all_stages)
        self._meter = Meter()
        self._begun_s: dict[int, float] = {}  # by task number: transfers that are offered and not yet carried
        self._runners: dict[str, Any] = {}
        self._shared: dict[Any, Any] = {}
        self._plane: DataPlane | None = None
        self._counted: Counter[str] = Counter()  # what was reported of the plane's counts
        self._store: Any = None
        self._original = Original()
        self._saving = Saving(self._unsaved, self._original)

    def meeting_point(self, host: str, deadline_s: float) -> int:
        """Open the store where the ranks of this group meet. Returns its port on `host`. For rank 0, before `join`."""
        self._store = open_store(host, self.group.processes, deadline_s=deadline_s)
        return self._store.port

    def join(self, host: str, port: int, deadline_s: float) -> None:
        """Join the other ranks of the group. Exchanges between them fail after `deadline_s`."""
        store = self._store
        if store is None:
            store = reach_store(host, port, self.group.processes, deadline_s=deadline_s)
        device = "cuda" if self.group.gpus else "cpu"
        layout, fetch = RankLayout.of(self.group), self.group.fetch
        self.ranks = Ranks.join(layout, self.rank, store, device=device, deadline_s=deadline_s, fetch=fetch)

    def setup(self) -> SluiceError | None:
        """Build the runners. Loads models."""
        if error := self._other_directory():
            return error
        context = StageContext(
            group=self.group,
            rank=self.rank,
            seed=self.settings.seed,
            group_size=self.settings.group_size,
            run_dir=self.settings.run_dir,
            shared=self._shared,
            steps=self.settings.steps,
            ranks=self.ranks,
            cancelled=self._cancelled,
            in_turns=self.group.name in self.settings.in_turns,
        )
        for stage in self.stages.values():
            try:
                with self._original.only(stage.name):
                    made = stage.setup(context)
                self._runners[stage.name] = returned.runner(stage, made)
                self._keep_vocabulary(stage, context)
            except CALLED as error:
                return self._error(stage, error, "setup failed")
        return None

    def _other_directory(self) -> SluiceError | None:
        """Return the error if this worker does not see the driver's run directory: what it saved would be lost."""
        run_dir, deadline_s = self.settings.run_dir, time.monotonic() + SHARED_S
        while run_dir and self.settings.mark:
            with suppress(OSError):
                if RunDir(run_dir).mark.read_text() == self.settings.mark:
                    return None
            if time.monotonic() > deadline_s:
                return StageError(
                    Problem(
                        where=f"run directory {run_dir}",
                        what=f"worker {self.rank} of {self.group.name!r} on {socket.gethostname()} does not see it",
                        why="all workers and the driver write checkpoints and samples there",
                        fix="--run-dir on storage that all machines share, under the same path",
                    )
                )
            time.sleep(0.1)  # a network file system may show it late
        return None

    def _keep_vocabulary(self, stage: Stage, context: StageContext) -> None:
        """Keep the vocabulary, once per run: 150,000 tokens take seconds, and a replacement worker holds up the run."""
        if isinstance(stage, Shows) and stage.shows and self.rank == 0 and context.run_dir:
            run_dir = RunDir(context.run_dir)
            if not run_dir.vocabulary.exists():
                keep_vocabulary(run_dir, stage.vocabulary(context))

    def connect(self, plane: DataPlane) -> None:
        """Connect to the data plane and register the graph's partition."""
        self._plane = plane
        register(plane, self.settings.partition, self._all_stages, self.settings.parts)

    def run(self, task: Task, meta: KVBatchMeta | None, cleared: Sequence[str] = ()) -> TaskResult:
        """Run a map task on the samples of `meta`, after dropping cached rows in `cleared`."""
        stage, result, start_s = self.stages[task.stage], TaskResult(task=task), self._begin(task, alone=True)
        columns: Columns = {}
        try:
            task, columns = self._inputs(stage, task, meta, cleared, result)
            keys = meta.keys if meta is not None else self._mint(task)
            with self._original.only(stage.name):
                produced = self._runners[stage.name](given(stage, columns), task)
            if stage.updates is not None and self._stamps and self._stamps.name in columns:
                result.events.append(self._trained(stage, task, keys, columns))
            self._keep(stage, task, keys, columns, [produced], result)
            result.finished = result.task.groups
        except CALLED as error:
            result.error = self._failed(stage, task, columns, error)
        self._end(result.task, result, start_s, result.metrics)
        return result

    async def stream(
        self, task: Task, meta: KVBatchMeta | None, cleared: Sequence[str] = (), *, linger_s: float = 0.0
    ) -> AsyncIterator[TaskResult]:
        """Run a stream task. Reports whenever there is output, and once at the end.

        Output that arrives during a put joins the next report, and output within `linger_s` joins the same one, so many
        small outputs become few puts.
        """
        stage, start_s = self.stages[task.stage], self._begin(task, alone=False)
        result = TaskResult(task=task)
        self._streaming.update(task.groups)
        metrics: dict[str, float] = {}
        weighed: dict[str, int] = {}  # by metric: the samples that it averages over
        left = set(task.groups)
        columns: Columns = {}
        try:
            task, columns = self._inputs(stage, task, meta, cleared, result)
            keys = meta.keys if meta is not None else self._mint(task)
            produced = self._runners[stage.name](given(stage, columns), task)
            async for outputs in _gathered(produced, linger_s, partial(self._original.check, stage.name)):
                weights = await asyncio.to_thread(self._keep, stage, task, keys, columns, outputs, result, left)
                for name, value in result.metrics.items():
                    metrics[name] = metrics.get(name, 0.0) + weights[name] * value
                    weighed[name] = weighed.get(name, 0) + weights[name]
                left.difference_update(result.finished)
                yield result
                result = TaskResult(task=task)
            if left:
                raise returned.unfinished(stage, left)
        except USERS as error:
            result.error = self._failed(stage, task, columns, error)
        self._streaming.difference_update(task.groups)
        self._cancelled.difference_update(task.groups)
        self._end(task, result, start_s, {name: value / weighed[name] for name, value in metrics.items()})
        yield result

    def cancel(self, groups: Sequence[int]) -> None:
        """Cancel these groups. Groups that have finished meanwhile stay finished."""
        self._cancelled.update(self._streaming.intersection(groups))

    def transfer(self, task: Task, rendezvous: Rendezvous) -> TaskResult:
        """Run one side of a transfer. A carrier's work ends the span that its offer began."""
        stage, result, start_s = self.stages[task.stage], TaskResult(task=task), self._begun_s.pop(task.number, None)
        if start_s is None:
            start_s = self._begin(task, alone=True)
        try:
            with self._original.only(stage.name):
                produced = self._runners[stage.name](rendezvous, task)
            output = returned.output(stage, produced, self._all_stages)
            result.metrics = {_full(stage, name): value for name, value in output.metrics.items()}
            result.weights = output.weights
        except (PeerLost, Unfit) as error:  # the run may continue
            result.error = self._error(stage, error, "failed")
        except CALLED as error:
            result.error = self._error(stage, error, f"failed at step {task.step + 1}")
        if rendezvous.side == "source" and rendezvous.meeting and not result.error:
            self._begun_s[task.number] = start_s
        else:
            self._end(task, result, start_s, result.metrics)
        return result

    def hold(self, folder: Path) -> None:
        """Copy the state of every stateful runner and begin to write it to `folder`; without room, write it now.

        A sharded stage's runner is called on every rank, because gathering needs all of them, and rank 0 writes. Other
        runners are called on rank 0 only. Raises CheckpointError if the disk is full or fails.
        """
        self._saving.hold(self._stateful(), folder, self.ranks.layout.size)

    def saved(self) -> None:
        """Wait until everything held is written; may be called from another thread. Raises as `hold` does."""
        self._saving.finish()

    def files(self, folder: Path) -> dict[str, int]:
        """Return the size of each file that the stages of this rank have in the checkpoint `folder`, by its path below
        it. Call it when all ranks have `saved`; may be called from another thread."""
        return self._saving.files(self._stateful(), folder)

    def _unsaved(self, stage: str, error: BaseException) -> SluiceError:
        return self._error(self.stages[stage], error, "failed to save its state")

    def saved_bytes(self) -> int:
        """Return how many bytes `hold` writes, as far as the runners know."""
        return self._saving.size_bytes(self._stateful())

    def _stateful(self) -> dict[str, Saves]:
        """Return the runners that this rank saves, by stage."""
        return {
            name: runner
            for name, runner in self._runners.items()
            if isinstance(runner, Saves) and (self.rank == 0 or self.stages[name].sharding)
        }

    def restore(self, folder: Path) -> None:
        """Restore what `hold` wrote. Raises StageError if a runner raises."""
        for name, runner in self._runners.items():
            if isinstance(runner, Saves):
                try:
                    with self._original.only(name):
                        runner.restore(folder / name)
                except SluiceError:
                    raise
                except CALLED as error:
                    raise self._error(self.stages[name], error, "failed to restore its state") from error

    @property
    def is_replaceable(self) -> bool:
        """Whether it can be replaced: no runner has state, and no rank waits for it."""
        return not self.ranks.connected and not any(isinstance(runner, Saves) for runner in self._runners.values())

    def turn(self, awake: bool, room: int | None = None) -> trace.Turned:
        """Wake up, or release GPU memory for a group that wants `room` bytes. No task runs meanwhile."""
        start_s = time.monotonic()
        holders = [held for held in self._shared.values() if isinstance(held, Sleeps)]
        used = [held.wake() if awake else held.sleep(room) for held in holders] or [(0, 0)]
        return trace.Turned(
            group=self.group.name,
            worker=self.rank,
            awake=awake,
            before_bytes=max(before for before, _ in used),
            memory_bytes=max(after for _, after in used),
            start_s=start_s,
            end_s=time.monotonic(),
        )

    def close(self) -> None:
        """Release shared resources, the data plane and the other ranks."""
        self._saving.close()
        for held in self._shared.values():
            if isinstance(held, Closes):
                with self._original.only(self.group.name):
                    held.close()
        self.ranks.leave()
        if self._plane is not None:
            self._plane.close()

    def _inputs(
        self, stage: Stage, task: Task, meta: KVBatchMeta | None, cleared: Sequence[str], result: TaskResult
    ) -> tuple[Task, Columns]:
        """Return the task with its shard, and its input columns."""
        assert self._plane is not None, "connect() comes before run()"
        if cleared:
            self._plane.evict(cleared)
        fields = [field.name for field in stage.reads if not field.per_step]
        if meta is not None and SHARD in meta.extra_info:
            task = self._sharded(stage, task, msgspec.convert(meta.extra_info[SHARD], Shard))
        if meta is None or not fields:
            return task, {}
        if isinstance(stage, KeepSamples) and stage.chooses:
            task, meta = self._chosen(stage, task, meta, result)
        return task, self.ranks.share(lambda: self._get(stage, task, meta, fields, result))

    def _chosen(
        self, stage: KeepSamples, task: Task, meta: KVBatchMeta, result: TaskResult
    ) -> tuple[Task, KVBatchMeta]:
        """Return the task and its handle, restricted to the groups that the stage chooses."""
        size, names = self.settings.group_size, [field.name for field in stage.chooses]
        seen = self.ranks.share(lambda: self._get(stage, task, meta, names, result))
        places = sorted(stage.choose(seen, size))
        kept = tuple(task.groups[place] for place in places)
        rows = [place * size + sample for place in places for sample in range(size)]
        return msgspec.structs.replace(task, groups=kept), meta.reorder(rows)

    def _sharded(self, stage: Stage, task: Task, shard: Shard) -> Task:
        """Return the task with its shard. Ranks first confirm that they have the same work."""
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
        sizes = tuple(size_bytes(columns[name]) for name in fields)
        result.events.append(
            trace.Got(
                stage=stage.name,
                step=task.step,
                fields=tuple(fields),
                samples=len(meta),
                size_bytes=sum(sizes),
                field_bytes=sizes,
                start_s=start_s,
                end_s=time.monotonic(),
            )
        )
        return columns

    def _keep(
        self,
        stage: Stage,
        task: Task,
        keys: tuple[str, ...],
        read: Columns,
        outputs: Sequence[Output],
        result: TaskResult,
        left: Collection[int] = (),
    ) -> dict[str, int]:
        """Put the runner's output in one put, and add its metrics, weighted by samples. `read` is what it was given,
        `left` the groups that a stream has not finished. Returns the samples that each metric averages over."""
        size = self.settings.group_size
        made = []
        for output in (returned.output(stage, produced, self._all_stages) for produced in outputs):
            if output.cancelled:
                result.cancelled |= {task.groups[position]: tokens for position, tokens in output.cancelled.items()}
            if output.columns or not output.cancelled:
                made.append(self._checked(stage, task, keys, read, output, result))
        if stage.shape == "stream":
            each = (dict.fromkeys(i // size for i in rows) for _, rows in made)
            result.finished = (*(task.groups[i] for positions in each for i in positions), *result.cancelled)
            counts = Counter(result.finished)
            if again := {group for group, count in counts.items() if count > 1} | (counts.keys() - set(left)):
                raise returned.repeated(stage, again)
        weights: dict[str, int] = {}
        for output, _ in made:
            for name, value in output.metrics.items():
                full, weight = _full(stage, name), _weight(output, keys) or 1
                result.metrics[full] = result.metrics.get(full, 0.0) + weight * value
                weights[full] = weights.get(full, 0) + weight
            result.weights = output.weights or result.weights
        for name, weight in weights.items():
            result.metrics[name] /= weight
        result.samples = sum(_weight(output, keys) for output, _ in made)
        if any(rows for _, rows in made) and any(not field.per_step for field in stage.writes) and self.ranks.leads:
            self._put(stage, task, keys, made, result)
        return weights

    def _checked(
        self, stage: Stage, task: Task, keys: tuple[str, ...], read: Columns, output: Output, result: TaskResult
    ) -> tuple[Output, Sequence[int]]:
        """Return an output, and the samples of the task that its columns belong to."""
        index = returned.rows(stage, output, task, len(keys), self.settings.group_size)
        if output.index is not None and index:  # before parts are merged, which would move rows from one to another
            fields = [field for field in stage.writes if not field.per_step]
            named = [keys[i] for i in index]
            check_kinds(self.settings.partition, fields, output.columns, named, stage=stage.name)
        returned.check_lengths(stage, read, output, index, keys)
        result.dropped |= {task.groups[position]: reason for position, reason in output.dropped.items()}
        return output, index

    def _put(
        self,
        stage: Stage,
        task: Task,
        keys: tuple[str, ...],
        made: Sequence[tuple[Output, Sequence[int]]],
        result: TaskResult,
    ) -> None:
        """Write the columns in canonical order, in one put."""
        assert self._plane is not None
        columns, index = in_order([(output.columns, rows) for output, rows in made])
        chosen = keys if len(index) == len(keys) else tuple(keys[i] for i in index)  # in order, and each once
        start_s = time.monotonic()
        handle = self._plane.put(
            chosen,
            columns,
            partition=self.settings.partition,
            stage=stage.name,
            attempt=task.attempt,
            unit=stage.per,
        )
        groups = groups_of(chosen)
        sizes = {name: group_bytes(column, tuple(groups.values())) for name, column in columns.items()}
        result.handles.append(handle)
        result.sizes.append(sizes)
        versions: dict[int, Versions] = {}
        if stamps := stamped_by(stage):
            versions = versions_of(columns[stamps.name], chosen)
            result.oldest |= {group: of.oldest for group, of in versions.items()}
        result.events.append(
            trace.Put(
                stage=stage.name,
                step=task.step,
                attempt=task.attempt,
                fields=handle.fields,
                groups=tuple(groups),
                samples=len(chosen),
                size_bytes=sum(map(sum, sizes.values())),
                versions=tuple((of.oldest, of.newest) for of in versions.values()),
                tokens=tuple(of.longest for of in versions.values()),
                start_s=start_s,
                end_s=time.monotonic(),
            )
        )

    def _trained(self, stage: Stage, task: Task, keys: tuple[str, ...], columns: Columns) -> trace.Trained:
        """Return the record of what this rank just trained on, read from the columns themselves."""
        assert self._stamps is not None
        versions = versions_of(columns[self._stamps.name], keys)
        per_token = [field.name for field in stage.reads if field.ragged == self._stamps.ragged]
        lengths: dict[str, Any] = {name: columns[name] for name in per_token}
        return trace.Trained(
            **trace.of(task),
            worker=self.rank,
            version=task.step,
            groups=tuple(versions),
            samples=tuple(of.samples for of in versions.values()),
            oldest=tuple(of.oldest for of in versions.values()),
            newest=tuple(of.newest for of in versions.values()),
            entries={name: len(column.values) for name, column in lengths.items()},
            at_s=time.monotonic(),
        )

    def _begin(self, task: Task, *, alone: bool) -> float:
        self._meter.begin(task.number, alone=alone)
        return time.monotonic()

    def _end(self, task: Task, result: TaskResult, start_s: float, metrics: dict[str, float]) -> None:
        """Record the end of a task on this worker."""
        if self._plane is not None:
            now = Counter(self._plane.counts)
            result.counts, self._counted = dict(now - self._counted), now
        result.events.append(
            trace.Ran(
                **trace.of(task),
                group=self.group.name,
                worker=self.rank,
                groups=task.groups,
                start_s=start_s,
                end_s=time.monotonic(),
                cpu_s=self._meter.end(task.number),
                metrics=metrics,
            )
        )

    def _failed(self, stage: Stage, task: Task, columns: Columns, error: BaseException) -> SluiceError:
        """Save the inputs of a failed task of the graph. Returns its error, as `_error` does."""
        reported = self._error(stage, error, f"failed at step {task.step + 1}")
        if self.settings.run_dir and not isinstance(stage, KeepSamples):
            folder = RunDir(self.settings.run_dir).failure(task.step, stage.name, self.rank)
            replay.save_inputs(folder, task, columns)
        return reported

    def _error(self, stage: Stage, error: BaseException, when: str) -> SluiceError:
        """Return the error to report for an exception of user code, which is logged. Raises any other exception."""
        if not is_users(error):
            raise error
        log = RunDir(self.settings.run_dir).log(self.group.name, self.rank) if self.settings.run_dir else None
        if log:
            try:
                with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    traceback.print_exception(error, file=file)
            except OSError:
                log = None
        return user_error(error, stage=stage.name, where=str(stage.location), when=when, log=log)


async def _gathered(
    produced: AsyncIterator[Output], linger_s: float, check: Callable[[], None]
) -> AsyncIterator[list[Output]]:
    """Yield everything that a stream yielded since the last iteration. It keeps running while the consumer is busy.
    `check` is called each time that the stream has run."""
    waiting: list[Output] = []
    came = asyncio.Event()

    async def take() -> None:
        try:
            async for output in produced:
                check()
                waiting.append(returned.own(output))
                came.set()
        except BaseException as error:
            check()
            task = asyncio.current_task()
            if isinstance(error, Exception) or (task and task.cancelling()) or not is_users(error):
                raise
            # in a task it would end the event loop, or pass as a cancellation
            raise RuntimeError(message_of(error)) from error

    taking = asyncio.ensure_future(take())
    taking.add_done_callback(lambda _: came.set())
    try:
        while True:
            await came.wait()
            if linger_s and not taking.done():
                await asyncio.wait({taking}, timeout=linger_s)
            came.clear()
            outputs, waiting[:] = list(waiting), []
            if outputs:
                yield outputs
            if taking.done():
                if not waiting:
                    taking.result()  # raises what the runner raised
                    return
                came.set()
    finally:
        taking.cancel()
        with suppress(asyncio.CancelledError):
            await taking
        await produced.aclose()  # type: ignore[attr-defined]


def _weight(output: Output, keys: Sequence[str]) -> int:
    """Return the number of samples that an output's metrics average over."""
    return len(output.index) if output.index is not None else len(keys)


def register(
    plane: DataPlane, partition: str, stages: Sequence[Stage], parts: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Register the graph's partition: its sample fields, its stages as readers, and the plan's parts."""
    plane.register(partition, sample_fields(stages), [stage.name for stage in stages], parts or None)


def _full(stage: Stage, metric: str) -> str:
    return metric if "/" in metric else f"{stage.name}/{metric}"
