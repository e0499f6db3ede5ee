"""Finds fields that a process outside the graph wrote directly into the data plane.

Polls the store, off the hot path, for the fields of `External` stages. Present fields get a handle, as if a stage of
the graph had put them. The process gets handles too: of what its stage reads, once that is present.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from pipeline.data_plane import DataPlane
from pipeline.data_plane.outside import SharedHandles
from pipeline.declare.columns import group_bytes, summed
from pipeline.declare.fields import Field
from pipeline.declare.handle import KVBatchMeta, group_of, groups_of, keys_of
from pipeline.engine.handles import HandleTable
from pipeline.engine.reports import Notice
from pipeline.engine.stored import Stored
from pipeline.errors import Problem, StageError
from pipeline.executors import Executor
from pipeline.plan.lifetimes import entry_bytes
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record import trace
from pipeline.schedule.events import Landed
from pipeline.schedule.scheduler import Scheduler

EVERY_S = 1.0  # between two polls of the store
LATE_S = 60.0  # after a group is cleared: what arrives for it within this time is cleared too


class Outside:
    """The fields of a plan that a stage reads and a process outside the graph writes, among `fields`."""

    def __init__(
        self, plan: Plan, fields: Sequence[Field], handles: HandleTable, stored: Stored, executor: Executor
    ) -> None:
        self._fields = {field.name: field for field in fields}
        self.stages = [stage for stage in plan.stages if stage.shape == "external"]
        self._plan, self._handles, self._stored, self._executor = plan, handles, stored, executor
        self._read = {edge.field for edge in plan.edges}
        self._asked_s = time.monotonic()
        self._admitted_s: dict[int, float] = {}  # by step: when groups were last admitted to it
        self._shared: dict[str, SharedHandles] = {}  # by stage: what its process can read
        self._gone_s: dict[int, float] = {}  # by group: when its handles were withdrawn

    def admitted(self, step: int, groups: tuple[int, ...]) -> None:
        """Note that groups were admitted to a step: their fields may arrive from now on."""
        if self.stages:
            self._admitted_s[step] = time.monotonic()

    def awaited(self) -> bool:
        """Return whether fields may arrive without a task."""
        return bool(self.stages)

    def due(self) -> bool:
        """Return whether there is a field to poll for, and the next poll is due."""
        return bool(self.stages) and time.monotonic() - self._asked_s >= EVERY_S

    def came(self, scheduler: Scheduler) -> Sequence[Notice]:
        """Return what has arrived since the last call. Raises StageError if a field exceeds its stage's timeout."""
        if not self.due():
            return ()
        self._asked_s = time.monotonic()
        steps = scheduler.steps_in_flight()
        self._admitted_s = {step: at_s for step, at_s in self._admitted_s.items() if step in steps}
        found = []
        for stage in self.stages:
            self._share(stage)
            self._clear_late(stage)
            for step in steps:
                for field in (field for field in stage.writes if field in self._read):
                    groups = scheduler.absent(step, field)
                    if groups and (put := self._adopt(self._executor.plane, stage, step, groups, field)):
                        found.append(put)
                    elif groups:
                        self._check_late(stage, step, field, self._admitted_s.get(step, self._asked_s))
        return found

    def _share(self, stage: PlannedStage) -> None:
        """Share the handles of groups that have what the stage's process reads, and the lengths of what it writes. A
        process that needs neither gets them too: it writes only to groups that were not cleared."""
        reads = [field for field in stage.reads if field not in self._plan.weights_fields]
        dims = {dim for field in stage.writes if field in self._read and (dim := self._fields[field].ragged)}
        if stage.name not in self._shared:
            self._shared[stage.name] = SharedHandles(self._executor.plane, self._plan.partition, stage.name)
        shared, complete = self._shared[stage.name], self._handles.complete(reads)
        self._gone_s |= dict.fromkeys(shared.groups - complete, self._asked_s)
        shared.keep(set(complete))
        new = (self._of(group, reads) for group in complete if group not in shared.groups)
        shared.share([handle for handle in new if dims <= handle.lengths.keys()])

    def _clear_late(self, stage: PlannedStage) -> None:
        """Clear what a process has written to groups that were cleared while it wrote, such as dropped ones."""
        self._gone_s = {group: at_s for group, at_s in self._gone_s.items() if self._asked_s - at_s <= LATE_S}
        keys = keys_of(tuple(self._gone_s.keys() - self._handles.complete(())), self._plan.group_size)
        plane, partition = self._executor.plane, self._plan.partition
        for field in stage.writes if keys else ():
            there = plane.presence(partition, keys, [field])[field]
            if late := [key for key, is_there in zip(keys, there) if is_there]:
                dim = self._fields[field].ragged
                plane.clear(plane.adopt(partition, late, [field], {dim: (0,) * len(late)} if dim else {}))

    def _of(self, group: int, fields: Sequence[str]) -> KVBatchMeta:
        """Return a group's handle of `fields`, with all lengths that are known."""
        keys = keys_of((group,), self._plan.group_size)
        made = self._handles.handle((group,), fields) or KVBatchMeta(
            keys=keys, partition_id=self._plan.partition, fields=()
        )
        return msgspec.structs.replace(made, lengths=self._handles.lengths(keys))

    def _adopt(self, plane: DataPlane, stage: PlannedStage, step: int, groups: list[int], field: str) -> Notice | None:
        keys = keys_of(tuple(groups), self._plan.group_size)
        there = plane.presence(self._plan.partition, keys, [field])[field]
        incomplete = {group_of(key) for key, is_there in zip(keys, there) if not is_there}
        present = [key for key in keys if group_of(key) not in incomplete]
        lengths = self._handles.lengths(present)
        if not present or self._fields[field].ragged not in (None, *lengths):  # its lengths are not known yet
            return None
        now_s = time.monotonic()
        handle = plane.adopt(self._plan.partition, present, [field], lengths)
        whole, sizes = self._handles.add(handle), self._sizes(plane, stage, field, handle)
        self._stored.add(tuple(groups_of(handle.keys)), {field: sizes})
        put = trace.Put(
            stage=stage.name,
            step=step,
            attempt=0,
            fields=(field,),
            groups=whole,
            samples=len(present),
            size_bytes=sum(sizes),
            start_s=now_s,
            end_s=time.monotonic(),
        )
        return Notice(Landed(step, whole, (field,), group_bytes=(self._stored.largest(field, whole),)), [put])

    def _sizes(self, plane: DataPlane, stage: PlannedStage, field: str, handle: KVBatchMeta) -> list[int]:
        """Return the bytes of a field of each group. Only texts are fetched for it."""
        samples = tuple(groups_of(handle.keys).values())
        if self._fields[field].dtype == "str":
            return group_bytes(plane.get(handle, [field], reader=stage.name)[field], samples)
        dim = self._fields[field].ragged
        entries = summed(handle.lengths[dim], samples) if dim else samples
        return [entry_bytes(self._fields[field]) * count for count in entries]

    def _check_late(self, stage: PlannedStage, step: int, field: str, admitted_s: float) -> None:
        if stage.timeout_s is not None and time.monotonic() - admitted_s > stage.timeout_s:
            raise StageError(
                Problem(
                    where=stage.where,
                    what=f"field {field!r} of step {step + 1} did not arrive in {stage.timeout_s:g} s",
                    why="a process outside the graph writes it",
                    fix="start that process, or raise timeout_s",
                )
            )
