"""The record of a run: its event schema, the writer of events.jsonl and a reader that can tail it.

Console, analysis, view and simulator read nothing else. Times `*_s` are seconds on the machine's monotonic clock;
`Started.monotonic_s` and `Started.wall_s` are the same instant on both clocks. One JSON object a line, `type` first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Started(msgspec.Struct, tag="started", frozen=True, kw_only=True):
    """A run, or its resumption after `start` steps."""

    graph: str
    start: int
    steps: int
    executor: str
    monotonic_s: float
    wall_s: float


class Placed(msgspec.Struct, tag="placed", frozen=True, kw_only=True):
    """A worker is up. `node` is the address of its machine in the cluster."""

    group: str
    worker: int
    node: str
    pid: int


class Admitted(msgspec.Struct, tag="admitted", frozen=True, kw_only=True):
    """Groups entered with a step."""

    step: int
    groups: tuple[int, ...]
    version: int
    at_s: float


class Dropped(msgspec.Struct, tag="dropped", frozen=True, kw_only=True):
    """A gate dropped groups of a step; as many others are admitted in their place."""

    stage: str
    step: int
    groups: tuple[int, ...]
    reason: str
    at_s: float


class Submitted(msgspec.Struct, tag="submitted", frozen=True, kw_only=True):
    """A task was handed to a worker."""

    stage: str
    step: int
    attempt: int
    group: str
    worker: int
    samples: int
    version: int
    at_s: float


class Got(msgspec.Struct, tag="got", frozen=True, kw_only=True):
    """A task fetched columns."""

    stage: str
    step: int
    fields: tuple[str, ...]
    samples: int
    size_bytes: int
    start_s: float
    end_s: float


class Put(msgspec.Struct, tag="put", frozen=True, kw_only=True):
    """A task wrote columns, or a process outside the graph did (`stage` is then the external stage)."""

    stage: str
    step: int
    attempt: int
    fields: tuple[str, ...]
    groups: tuple[int, ...]
    samples: int
    size_bytes: int
    start_s: float
    end_s: float


class Ran(msgspec.Struct, tag="ran", frozen=True, kw_only=True):
    """A task finished on a worker. The span holds its gets, its work and its puts."""

    stage: str
    step: int
    attempt: int
    group: str
    worker: int
    groups: tuple[int, ...]
    start_s: float
    end_s: float
    metrics: dict[str, float]


class Published(msgspec.Struct, tag="published", frozen=True, kw_only=True):
    """A policy version is served; the target acknowledged the hash of the weights."""

    stage: str
    step: int
    version: int
    sha256: str
    at_s: float


class Cleared(msgspec.Struct, tag="cleared", frozen=True, kw_only=True):
    """Rows were removed: their last reader had acknowledged."""

    step: int
    groups: tuple[int, ...]
    start_s: float
    end_s: float


class Checkpointed(msgspec.Struct, tag="checkpointed", frozen=True, kw_only=True):
    """A checkpoint is complete on disk."""

    step: int
    folder: str
    size_bytes: int
    start_s: float
    end_s: float


class StepEnded(msgspec.Struct, tag="step_ended", frozen=True, kw_only=True):
    """Every stage has acknowledged the step. `metrics` is its line in metrics.jsonl."""

    step: int
    metrics: dict[str, float]
    at_s: float


class Failed(msgspec.Struct, tag="failed", frozen=True, kw_only=True):
    """What ended the run early."""

    stage: str | None
    step: int | None
    error: str
    problems: tuple[str, ...]
    at_s: float


class Ended(msgspec.Struct, tag="ended", frozen=True, kw_only=True):
    """The run is over; `rows_left` counts what the data plane still held before its final sweep."""

    steps: int
    rows_left: int
    at_s: float


TraceEvent = (
    Started
    | Placed
    | Admitted
    | Dropped
    | Submitted
    | Got
    | Put
    | Ran
    | Published
    | Cleared
    | Checkpointed
    | StepEnded
    | Failed
    | Ended
)
_DECODER = msgspec.json.Decoder(TraceEvent)


class TraceWriter:
    """Appends events. `flush` hands the queued lines to the operating system."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("ab") if path else None
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
