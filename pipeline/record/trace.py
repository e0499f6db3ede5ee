"""The record of a run: its event schema, the writer of events.jsonl and a reader that can tail it.

Console, analysis, view and simulator read nothing else. Times `*_s` are seconds on the machine's monotonic clock;
`Started.monotonic_s` and `Started.wall_s` are the same instant on both clocks. One JSON object a line, `type` first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipeline.declare.task import Task


class Started(msgspec.Struct, tag="started", frozen=True, kw_only=True, gc=False):
    """A run, or its resumption after `start` steps."""

    graph: str
    start: int
    steps: int
    executor: str
    monotonic_s: float
    wall_s: float


class Placed(msgspec.Struct, tag="placed", frozen=True, kw_only=True, gc=False):
    """A worker is up. `node` is the address of its machine in the cluster."""

    group: str
    worker: int
    node: str
    pid: int


class Turned(msgspec.Struct, tag="turned", frozen=True, kw_only=True, gc=False):
    """A worker that shares its GPUs with another group woke up, or gave its memory to that one.

    `memory_bytes` are those in use on its first GPU afterwards, by all processes, `before_bytes` those before; 0 on a
    CPU.
    """

    group: str
    worker: int
    awake: bool
    before_bytes: int = 0
    memory_bytes: int
    start_s: float
    end_s: float


class Admitted(msgspec.Struct, tag="admitted", frozen=True, kw_only=True, gc=False):
    """Groups entered. `step` is the batch that they are for, or, with on_stale="drop", that is being filled."""

    step: int
    groups: tuple[int, ...]
    version: int
    at_s: float


class Claimed(msgspec.Struct, tag="claimed", frozen=True, kw_only=True, gc=False):
    """These groups are the batch of the step. Each is claimed once, and trained."""

    step: int
    groups: tuple[int, ...]
    at_s: float


class Dropped(msgspec.Struct, tag="dropped", frozen=True, kw_only=True, gc=False):
    """Groups left without being trained; as many others are admitted in their place.

    `stage` is the gate, or empty where they are too old: `reason` is then "stale", or "cancelled" for those that were
    still being sampled. `tokens` are those of the longest response of each, where known.
    """

    stage: str
    step: int
    groups: tuple[int, ...]
    reason: str
    tokens: tuple[int, ...] = ()
    at_s: float


class _OfTask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is said of a task, or of some of its groups."""

    task: int
    stage: str
    step: int
    attempt: int
    groups: tuple[int, ...]


def of(task: Task) -> dict[str, Any]:
    """The fields that name a task in what is said of it."""
    return {"task": task.number, "stage": task.stage, "step": task.step, "attempt": task.attempt}


class Submitted(_OfTask, tag="submitted", frozen=True, kw_only=True, gc=False):
    """A task was handed to a worker group: to one of its data-parallel replicas, or (`replica` None) to all."""

    group: str
    replica: int | None
    samples: int
    version: int
    at_s: float


class Got(msgspec.Struct, tag="got", frozen=True, kw_only=True, gc=False):
    """A task fetched columns."""

    stage: str
    step: int
    fields: tuple[str, ...]
    samples: int
    size_bytes: int
    start_s: float
    end_s: float


class Put(msgspec.Struct, tag="put", frozen=True, kw_only=True, gc=False):
    """A task wrote columns, or a process outside the graph did (`stage` is then the external stage).

    `versions` are the oldest and the newest version among the tokens of each group, where the columns say so, and
    `tokens` are those of the longest response of each.
    """

    stage: str
    step: int
    attempt: int
    fields: tuple[str, ...]
    groups: tuple[int, ...]
    samples: int
    size_bytes: int
    versions: tuple[tuple[int, int], ...] = ()
    tokens: tuple[int, ...] = ()
    start_s: float
    end_s: float


class Ran(_OfTask, tag="ran", frozen=True, kw_only=True, gc=False):
    """A task finished on a worker. The span holds its gets, its work and its puts.

    `cpu_s` are CPU seconds of the worker's process in the span, over all threads, without those of other tasks that ran
    inside it.
    """

    group: str
    worker: int
    start_s: float
    end_s: float
    cpu_s: float
    metrics: dict[str, float]


class Acknowledged(_OfTask, tag="acknowledged", frozen=True, kw_only=True, gc=False):
    """The driver has taken a report: the task reads these groups no more, and what it writes of them is present."""

    at_s: float


class Trained(_OfTask, tag="trained", frozen=True, kw_only=True, gc=False):
    """What one rank trained on, seen in the columns themselves.

    `version` is that of the weights before the update. One entry a group in `samples`, `oldest` and `newest` (versions
    of its tokens); `entries` counts the values of every column that has one a token.
    """

    worker: int
    version: int
    samples: tuple[int, ...]
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    entries: dict[str, int]
    at_s: float


class Retried(_OfTask, tag="retried", frozen=True, kw_only=True, gc=False):
    """An attempt at a task is lost; its groups are handed out again, and what it may still report is ignored."""

    reason: str
    at_s: float


class Fenced(_OfTask, tag="fenced", frozen=True, kw_only=True, gc=False):
    """A report of an attempt that is no longer current was ignored."""

    at_s: float


class Served(msgspec.Struct, tag="served", frozen=True, kw_only=True, gc=False):
    """A replica has a policy version before the transfer to all of them is over: it may sample with it."""

    task: int
    stage: str
    step: int
    attempt: int
    replica: int
    version: int
    at_s: float


class Published(msgspec.Struct, tag="published", frozen=True, kw_only=True, gc=False):
    """A policy version is served; the target acknowledged the hash of the weights."""

    stage: str
    step: int
    version: int
    sha256: str
    at_s: float


class Cleared(msgspec.Struct, tag="cleared", frozen=True, kw_only=True, gc=False):
    """Rows were removed: their last reader had acknowledged."""

    step: int
    groups: tuple[int, ...]
    start_s: float
    end_s: float


class Checkpointed(msgspec.Struct, tag="checkpointed", frozen=True, kw_only=True, gc=False):
    """A checkpoint is complete on disk."""

    step: int
    folder: str
    size_bytes: int
    start_s: float
    end_s: float


class StepEnded(msgspec.Struct, tag="step_ended", frozen=True, kw_only=True, gc=False):
    """Every stage has acknowledged the step. `metrics` is its line in metrics.jsonl.

    `driver_cpu_s` are CPU seconds of the driver so far, `processes_cpu_s` those of it and of every process that it
    started; 0 where they were not read at this step.
    """

    step: int
    metrics: dict[str, float]
    driver_cpu_s: float = 0.0
    processes_cpu_s: float = 0.0
    at_s: float


class Stopping(msgspec.Struct, tag="stopping", frozen=True, kw_only=True, gc=False):
    """The run was asked to stop: from here on nothing is admitted, and no training begins."""

    at_s: float


class Failed(msgspec.Struct, tag="failed", frozen=True, kw_only=True, gc=False):
    """What ended the run early."""

    stage: str | None
    step: int | None
    error: str
    problems: tuple[str, ...]
    at_s: float


class Ended(msgspec.Struct, tag="ended", frozen=True, kw_only=True, gc=False):
    """The run is over; `rows_left` counts what the data plane still held before its final sweep."""

    steps: int
    rows_left: int
    at_s: float


TraceEvent = (
    Started
    | Placed
    | Turned
    | Admitted
    | Claimed
    | Dropped
    | Submitted
    | Got
    | Put
    | Ran
    | Acknowledged
    | Trained
    | Retried
    | Fenced
    | Published
    | Served
    | Cleared
    | Checkpointed
    | StepEnded
    | Stopping
    | Failed
    | Ended
)
BLOCK = 1 << 16  # bytes that are looked at together
_DECODER = msgspec.json.Decoder(TraceEvent)


class TraceWriter:
    """Appends events. `flush` hands the queued lines to the operating system.

    A last line that a killed run left unfinished is cut off.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("ab") if path else None
        if path and self._file:
            self._file.truncate(whole_lines(path))
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()

    def write(self, event: TraceEvent) -> None:
        """Queue one event."""
        if self._file:
            self._buffer += self._encoder.encode(event)
            self._buffer += b"\n"

    def flush(self) -> None:
        """Hand the queued lines to the operating system."""
        if self._file and self._buffer:
            self._file.write(self._buffer)
            self._file.flush()
            self._buffer.clear()

    def close(self) -> None:
        """Flush, sync to disk, close. Idempotent."""
        if self._file:
            self.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def whole_lines(path: Path) -> int:
    """The bytes of a file up to the end of its last whole line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in range((size - 1) // BLOCK * BLOCK, -1, -BLOCK):
            file.seek(start)
            newline = file.read(min(BLOCK, size - start)).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
    return 0


def read(path: Path, offset: int = 0) -> Iterator[tuple[int, TraceEvent]]:
    """Whole lines from byte `offset` on, each with the offset behind it: where to go on reading.

    A last line without its newline is still being written and is left for the next call. Raises
    msgspec.ValidationError on a line that is no event.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield offset, _DECODER.decode(line)
