"""One process of a worker group. It holds the runners of its stages and turns handles into handles.

It fetches the columns that a stage reads, calls the runner, puts the returned columns, and reports spans. It knows no
Ray; the executors wrap it. Any exception of user code leaves here as a `StageError`, with its inputs saved for
`--replay`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.data_plane import DataPlane
from pipeline.data_plane.tensordicts import given
from pipeline.declare.abilities import HasServer, Shows, server_of, stamps_of
from pipeline.declare.group import WorkerGroup
from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.held import Closes, Saves, Sleeps
from pipeline.declare.ranks import RankLayout, Ranks, open_store, reach_store
from pipeline.declare.stage import Stage
from pipeline.declare.task import Rendezvous, ServerAddress, StageContext, Task
from pipeline.errors import CALLED, USERS, PeerLost, Problem, SluiceError, StageError, Unfit
from pipeline.executors import returned
from pipeline.executors.failures import Failures
from pipeline.executors.inputs import Inputs, TaskInputs
from pipeline.executors.meter import Meter
from pipeline.executors.outputs import Outputs, TaskResult, gathered, metric_name
from pipeline.executors.policy_versions import versions_of
from pipeline.executors.saving import Saving
from pipeline.forks import Original
from pipeline.plan.planner import sample_fields
from pipeline.plan.samples import keep_vocabulary
from pipeline.record import trace
from pipeline.rundir import RunDir

SHARED_S = 10.0  # for a network file system to show what the driver wrote


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of every worker of a run. `parts` are the plan's partitions, with their fields. `mark` is the text
    in the run directory by which a worker knows that it sees the driver's. `folders` are the folders from which the
    driver imports the user's modules. `beside` has the groups that share GPUs with others, and the bytes that these
    keep on each GPU meanwhile."""

    partition: str
    parts: Mapping[str, tuple[str, ...]]
    group_size: int
    steps: int
    seed: int
    run_dir: Path | None
    mark: str = ""
    folders: tuple[str, ...] = ()
    beside: Mapping[str, float] = field(default_factory=dict)
    max_staleness: int = 0


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
        self._servers: dict[str, list[ServerAddress]] = {}  # by stage
        self._plane: DataPlane | None = None
        self._counted: Counter[str] = Counter()  # what was reported of the plane's counts
        self._store: Any = None
        self._original = Original()
        self._saving = Saving(self._unsaved, self._original)
        self._failures = Failures(settings.run_dir, group.name, rank)

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
        context = self._context()
        for stage in self.stages.values():
            own = replace(context, servers=self._servers.setdefault(stage.name, []))
            try:
                with self._original.only(stage.name):
                    made = stage.setup(own)
                self._runners[stage.name] = returned.runner(stage, made)
                self._keep_vocabulary(stage, context)
            except CALLED as error:
                return self._failures.of(stage, error, "setup failed")
        return None

    def serve(self, host: str) -> dict[str, ServerAddress]:
        """Listen at the address `host` for the stages that this group serves. Returns where, by stage. Raises
        SluiceError if that fails."""
        found = {}
        for stage in self._all_stages:
            group = server_of(stage)
            if isinstance(stage, HasServer) and group is not None and group.name == self.group.name:
                try:
                    with self._original.only(stage.name):
                        found[stage.name] = stage.serve(self._context(), host)
                except CALLED as error:
                    raise self._failures.of(stage, error, "cannot be served") from error
        return found

    def found(self, servers: Mapping[str, Sequence[ServerAddress]]) -> None:
        """Let the stages of this worker know where those listen that serve them."""
        for name in self.stages.keys() & servers.keys():
            self._servers[name][:] = servers[name]

    def _context(self) -> StageContext:
        return StageContext(
            group=self.group,
            rank=self.rank,
            seed=self.settings.seed,
            group_size=self.settings.group_size,
            run_dir=self.settings.run_dir,
            shared=self._shared,
            steps=self.settings.steps,
            ranks=self.ranks,
            cancelled=self._cancelled,
            in_turns=self.group.name in self.settings.beside,
            beside_bytes=self.settings.beside.get(self.group.name, 0.0),
            max_staleness=self.settings.max_staleness,
        )

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
        size, partition = self.settings.group_size, self.settings.partition
        self._plane = plane
        self._inputs = Inputs(plane, self.ranks, size)
        self._outputs = Outputs(
            plane,
            self._all_stages,
            partition=partition,
            group_size=size,
            leads=self.ranks.leads,
            worker=(self.group.name, self.rank),
        )
        register(plane, partition, self._all_stages, self.settings.parts)

    def run(self, task: Task, meta: KVBatchMeta | None, cleared: Sequence[str] = ()) -> TaskResult:
        """Run a map task on the samples of `meta`, after dropping cached rows in `cleared`."""
        stage, result, start_s = self.stages[task.stage], TaskResult(task=task), self._begin(task, alone=True)
        inputs = TaskInputs(stage, task)
        try:
            inputs = self._inputs.of(stage, task, meta, cleared, result.events.append)
            with self._original.only(stage.name):
                produced = self._runners[stage.name](given(stage, inputs.columns), inputs.task)
            if stage.updates is not None and self._stamps and self._stamps.name in inputs.columns:
                result.events.append(self._trained(inputs))
            self._outputs.keep(inputs, [produced], result)
            result.finished = task.groups
        except CALLED as error:
            result.error = self._failures.of_task(inputs, error)
        self._end(task, result, start_s, result.metrics)
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
        inputs = TaskInputs(stage, task)
        try:
            inputs = self._inputs.of(stage, task, meta, cleared, result.events.append)
            produced = self._runners[stage.name](given(stage, inputs.columns), inputs.task)
            async for outputs in gathered(produced, linger_s, partial(self._original.check, stage.name)):
                weights = await asyncio.to_thread(self._outputs.keep, inputs, outputs, result, left)
                for name, value in result.metrics.items():
                    metrics[name] = metrics.get(name, 0.0) + weights[name] * value
                    weighed[name] = weighed.get(name, 0) + weights[name]
                left.difference_update(result.finished)
                yield result
                result = TaskResult(task=task)
            if left:
                raise returned.unfinished(stage, left)
        except USERS as error:
            result.error = self._failures.of_task(inputs, error)
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
            result.metrics = {metric_name(stage, name): value for name, value in output.metrics.items()}
            result.weights = output.weights
        except (PeerLost, Unfit) as error:  # the run may continue
            result.error = self._failures.of(stage, error, "failed")
        except CALLED as error:
            result.error = self._failures.of(stage, error, f"failed at step {task.step + 1}")
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
        return self._failures.of(self.stages[stage], error, "failed to save its state")

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
                    raise self._failures.of(self.stages[name], error, "failed to restore its state") from error

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

    def _trained(self, inputs: TaskInputs) -> trace.Trained:
        """Return the record of what this rank just trained on, read from the columns themselves."""
        assert self._stamps is not None
        stage, task, columns = inputs.stage, inputs.task, inputs.columns
        versions = versions_of(columns[self._stamps.name], inputs.keys)
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


def register(
    plane: DataPlane, partition: str, stages: Sequence[Stage], parts: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Register the graph's partition: its sample fields, its stages as readers, and the plan's parts."""
    plane.register(partition, sample_fields(stages), [stage.name for stage in stages], parts or None)
