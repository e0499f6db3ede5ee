"""What the driver hears: reports of tasks, and notices of what no task brings. Knows no worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pipeline.declare.task import Task
from pipeline.record import trace
from pipeline.schedule.events import Event


class Report(Protocol):
    """What the driver reads of a report; `pipeline.executors.worker.TaskResult`, which says what each field is, is one.
    `handles` are looked at by who knows where columns lie."""

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
    def error(self) -> Any: ...
    @property
    def served(self) -> int | None: ...
    @property
    def lost(self) -> str | None: ...


class Notice(NamedTuple):
    """Something happened that is no report of a task: what the scheduler hears of it, and what is written down."""

    event: Event
    written: trace.TraceEvent
