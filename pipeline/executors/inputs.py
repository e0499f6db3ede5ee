"""What a worker gives to the runner of a stage: the task with its shard, and the columns that the stage reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from pipeline.data_plane import DataPlane
from pipeline.declare.columns import Columns, size_bytes
from pipeline.declare.handle import KVBatchMeta, keys_of
from pipeline.declare.ranks import Ranks
from pipeline.declare.sharding import Shard
from pipeline.declare.stage import Stage
from pipeline.declare.task import Task
from pipeline.plan.samples import KeepSamples
from pipeline.record import trace

SHARD = "shard"  # the key in a handle's extra_info for its microbatches
Record: TypeAlias = Callable[[trace.Got], None]


@dataclass(frozen=True)
class TaskInputs:
    """A task of a stage with its inputs: the keys of its samples, and the columns by field."""

    stage: Stage
    task: Task
    keys: tuple[str, ...] = ()
    columns: Columns = field(default_factory=dict)


class Inputs:
    """Fetches the inputs of a worker's tasks, together with the other ranks of its group."""

    def __init__(self, plane: DataPlane, ranks: Ranks, group_size: int) -> None:
        self._plane, self._ranks, self._group_size = plane, ranks, group_size

    def of(
        self, stage: Stage, task: Task, meta: KVBatchMeta | None, cleared: Sequence[str], record: Record
    ) -> TaskInputs:
        """Return the task with its shard and its input columns, after dropping cached rows in `cleared`. `record` is
        called with what was fetched."""
        if cleared:
            self._plane.evict(cleared)
        fields = [field.name for field in stage.reads if not field.per_step]
        keys = meta.keys if meta is not None else keys_of(task.groups, self._group_size)
        if meta is not None and SHARD in meta.extra_info:
            task = self._sharded(stage, task, msgspec.convert(meta.extra_info[SHARD], Shard))
        if meta is None or not fields:
            return TaskInputs(stage, task, keys)
        if isinstance(stage, KeepSamples) and stage.chooses:
            task, meta = self._chosen(stage, task, meta, record)
        return TaskInputs(stage, task, keys, self._ranks.share(lambda: self._get(stage, task, meta, fields, record)))

    def _chosen(self, stage: KeepSamples, task: Task, meta: KVBatchMeta, record: Record) -> tuple[Task, KVBatchMeta]:
        """Return the task and its handle, restricted to the groups that the stage chooses."""
        size, names = self._group_size, [field.name for field in stage.chooses]
        seen = self._ranks.share(lambda: self._get(stage, task, meta, names, record))
        places = sorted(stage.choose(seen, size))
        kept = tuple(task.groups[place] for place in places)
        rows = [place * size + sample for place in places for sample in range(size)]
        return msgspec.structs.replace(task, groups=kept), meta.reorder(rows)

    def _sharded(self, stage: Stage, task: Task, shard: Shard) -> Task:
        """Return the task with its shard. Ranks first confirm that they have the same work."""
        if self._ranks.connected and stage.sharding and stage.sharding.equal:
            pads = [[(part.prompt, part.response) for part in update.microbatches] for update in shard.updates]
            counts = [f"{len(pad)} microbatches {pad}" for pad in pads]
            self._ranks.agree(f"stage {stage.name!r}, step {task.step + 1}", f"update {', '.join(counts)}")
        return msgspec.structs.replace(task, shard=shard)

    def _get(self, stage: Stage, task: Task, meta: KVBatchMeta, fields: list[str], record: Record) -> Columns:
        start_s = time.monotonic()
        columns = self._plane.get(meta, fields, reader=stage.name)
        sizes = tuple(size_bytes(columns[name]) for name in fields)
        record(
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
