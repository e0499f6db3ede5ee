"""What the driver receives: reports of tasks, and notices of everything else. Knows no workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pipeline.declare.task import Task
from pipeline.record import trace
from pipeline.schedule.events import Event


class TaskReport(Protocol):
    """The part of a report that the driver reads. `pipeline.executors.outputs.TaskResult` implements and documents it.
    Only the `Store` reads `handles`."""

    @property
    def task(self) -> Task: ...
    @property
    def finished(self) -> tuple[int, ...]: ...
    @property
    def events(self) -> Sequence[trace.TraceEvent]: ...
    @property
    def handles(self) -> Sequence[Any]: ...
    @property
    def weights(self) -> tuple[int, str] | None: ...
    @property
    def dropped(self) -> Mapping[int, str] | None: ...
    @property
    def cancelled(self) -> Mapping[int, int]: ...
    @property
    def open(self) -> Mapping[str, int] | None: ...
    @property
    def error(self) -> Any: ...
    @property
    def served(self) -> int | None: ...
    @property
    def lost(self) -> str | None: ...


class Notice(NamedTuple):
    """Something that no task reported: the event for the scheduler, and the events for the record."""

    event: Event
    written: Sequence[trace.TraceEvent]
