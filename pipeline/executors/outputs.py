"""What a worker returns for a task: columns, checked and put, and a report with metrics and handles."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from pipeline.data_plane import DataPlane
from pipeline.data_plane.checks import check_kinds
from pipeline.declare.abilities import stamped_by
from pipeline.declare.columns import group_bytes, in_order
from pipeline.declare.handle import KVBatchMeta, groups_of
from pipeline.declare.stage import Stage
from pipeline.declare.task import Output, Task
from pipeline.errors import is_users, message_of
from pipeline.executors import returned
from pipeline.executors.inputs import TaskInputs
from pipeline.executors.policy_versions import Versions, versions_of
from pipeline.record import trace
from pipeline.record.spent import spent


class TaskResult(msgspec.Struct, kw_only=True):
    """A worker's report on a task: all of it, or, for a stream, everything since the last report.

    counts     what the worker's data plane counted since its last report
    sizes      of each handle: the bytes of each field that it put, by group
    finished   finished groups, by admission number
    samples    the number of samples that the metrics average over
    dropped    dropped groups, with the gate's reason
    cancelled  canceled groups, with the length of their longest sample
    open       of a stream whose samples have times: how many of the worker's are not finished, by part; None if unsaid
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
    open: dict[str, int] | None = None
    oldest: dict[int, int] = {}
    events: list[trace.Got | trace.Put | trace.Ran | trace.Spent | trace.Trained | trace.Placed | trace.Turned] = []
    error: Any = None
    served: int | None = None
    lost: str | None = None


class Outputs:
    """Keeps what runners return: columns in the data plane, if the worker `leads`, and the rest in reports."""

    def __init__(
        self,
        plane: DataPlane,
        stages: Sequence[Stage],
        *,
        partition: str,
        group_size: int,
        leads: bool,
        worker: tuple[str, int],
    ) -> None:
        self._plane, self._stages, self._partition, self._group_size = plane, stages, partition, group_size
        self._leads, self._worker = leads, worker

    def keep(
        self, inputs: TaskInputs, outputs: Sequence[Output], result: TaskResult, left: Collection[int] = ()
    ) -> dict[str, int]:
        """Put the runner's output in one put, and add its metrics, weighted by samples. `left` are the groups that a
        stream has not finished. Returns the samples that each metric averages over."""
        stage, task, keys, size = inputs.stage, inputs.task, inputs.keys, self._group_size
        made = []
        for output in (returned.output(stage, produced, self._stages) for produced in outputs):
            if output.times and self._leads:
                result.events += self._spent(inputs, output)
            if output.cancelled:
                result.cancelled |= {task.groups[position]: tokens for position, tokens in output.cancelled.items()}
            if output.open is not None and self._leads:
                result.open = returned.open_samples(stage, output.open)
            if returned.finishes(output):
                made.append(self._checked(inputs, output, result))
        if stage.shape == "stream":
            each = (dict.fromkeys(i // size for i in rows) for _, rows in made)
            result.finished = (*(task.groups[i] for positions in each for i in positions), *result.cancelled)
            counts = Counter(result.finished)
            if again := {group for group, count in counts.items() if count > 1} | (counts.keys() - set(left)):
                raise returned.repeated(stage, again)
        weights: dict[str, int] = {}
        for output, _ in made:
            for name, value in output.metrics.items():
                full, weight = metric_name(stage, name), _weight(output, keys) or 1
                result.metrics[full] = result.metrics.get(full, 0.0) + weight * value
                weights[full] = weights.get(full, 0) + weight
            result.weights = output.weights or result.weights
        for name, weight in weights.items():
            result.metrics[name] /= weight
        result.samples = sum(_weight(output, keys) for output, _ in made)
        if any(rows for _, rows in made) and any(not field.per_step for field in stage.writes) and self._leads:
            self._put(inputs, made, result)
        return weights

    def _checked(self, inputs: TaskInputs, output: Output, result: TaskResult) -> tuple[Output, Sequence[int]]:
        """Return an output, and the samples of the task that its columns belong to."""
        stage, task, keys = inputs.stage, inputs.task, inputs.keys
        index = returned.rows(stage, output, task, len(keys), self._group_size)
        if output.index is not None and index:  # before parts are merged, which would move rows from one to another
            fields = [field for field in stage.writes if not field.per_step]
            named = [keys[i] for i in index]
            check_kinds(self._partition, fields, output.columns, named, stage=stage.name)
        returned.check_lengths(stage, inputs.columns, output, index, keys)
        result.dropped |= {task.groups[position]: reason for position, reason in output.dropped.items()}
        return output, index

    def _spent(self, inputs: TaskInputs, output: Output) -> Iterator[trace.Spent]:
        """Yield how the time of samples was spent, by group. A task without groups has samples of its own."""
        task, size, samples = inputs.task, self._group_size, len(inputs.keys)
        if not task.groups:
            size = samples = len(output.times)
        for place in returned.timed_groups(inputs.stage, output, samples, size):
            times = [output.times[i] for i in range(place * size, (place + 1) * size)]
            group = task.groups[place] if task.groups else None
            yield spent(task, group, times, output.at_once, self._worker)

    def _put(self, inputs: TaskInputs, made: Sequence[tuple[Output, Sequence[int]]], result: TaskResult) -> None:
        """Write the columns in canonical order, in one put."""
        stage, task, keys = inputs.stage, inputs.task, inputs.keys
        columns, index = in_order([(output.columns, rows) for output, rows in made])
        chosen = keys if len(index) == len(keys) else tuple(keys[i] for i in index)  # in order, and each once
        start_s = time.monotonic()
        handle = self._plane.put(
            chosen,
            columns,
            partition=self._partition,
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


async def gathered(
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


def metric_name(stage: Stage, metric: str) -> str:
    """Return the name under which a metric of a stage is recorded."""
    return metric if "/" in metric else f"{stage.name}/{metric}"
