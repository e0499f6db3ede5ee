"""The record of a run: event schema, writer of events.jsonl, and a reader that can tail it.

Console, analysis, view and simulator read nothing else. Times `*_s` are seconds on the machine's monotonic clock;
`Started.monotonic_s` and `Started.wall_s` are the same instant on both clocks. One JSON object per line, `type` first.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedWriter
from mmap import ACCESS_READ, mmap
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import msgspec

from pipeline.declare.task import Task
from pipeline.reading import decode
from pipeline.rundir import private
from pipeline.writing import recording


class Started(msgspec.Struct, tag="started", frozen=True, kw_only=True, gc=False):
    """A run started, or resumed after `start` steps."""

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
    """A colocated worker woke up, or released its memory to the other group.

    `memory_bytes` is memory in use on its first GPU afterwards, by all processes; `before_bytes` the same before; 0 on
    a CPU.
    """

    group: str
    worker: int
    awake: bool
    before_bytes: int = 0
    memory_bytes: int
    start_s: float
    end_s: float


class Admitted(msgspec.Struct, tag="admitted", frozen=True, kw_only=True, gc=False):
    """Groups were admitted. `step` is their batch, or, of a plan with a pool, the batch being filled."""

    step: int
    groups: tuple[int, ...]
    version: int
    at_s: float


class Claimed(msgspec.Struct, tag="claimed", frozen=True, kw_only=True, gc=False):
    """These groups form the batch of the step. Each is claimed once and trained."""

    step: int
    groups: tuple[int, ...]
    at_s: float


class Dropped(msgspec.Struct, tag="dropped", frozen=True, kw_only=True, gc=False):
    """Groups were dropped; the same number is admitted to replace them.

    `stage` is the gate, or empty for groups that are too old; `reason` is then "stale", or "cancelled" if they were
    still sampling. `tokens` is the longest response of each group, if known.
    """

    stage: str
    step: int
    groups: tuple[int, ...]
    reason: str
    tokens: tuple[int, ...] = ()
    at_s: float


class _OfTask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event about a task, or some of its groups."""

    task: int
    stage: str
    step: int
    attempt: int
    groups: tuple[int, ...]


def of(task: Task) -> dict[str, Any]:
    """Return the fields that identify a task in events."""
    return {"task": task.number, "stage": task.stage, "step": task.step, "attempt": task.attempt}


class Submitted(_OfTask, tag="submitted", frozen=True, kw_only=True, gc=False):
    """A task was submitted to one data-parallel replica of a worker group, or to all (`replica` None)."""

    group: str
    replica: int | None
    samples: int
    version: int
    at_s: float


class Got(msgspec.Struct, tag="got", frozen=True, kw_only=True, gc=False):
    """A task fetched columns. `field_bytes` has the bytes of each field."""

    stage: str
    step: int
    fields: tuple[str, ...]
    samples: int
    size_bytes: int
    field_bytes: tuple[int, ...] = ()
    start_s: float
    end_s: float


class Put(msgspec.Struct, tag="put", frozen=True, kw_only=True, gc=False):
    """A task wrote columns, or an external process did (`stage` is then the external stage).

    `versions` are the oldest and newest token version of each group, if the columns have versions; `tokens` is the
    longest response of each.
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
    """A task finished on a worker. The span covers its gets, its work and its puts.

    `cpu_s` is CPU seconds of the worker process in the span, over all threads, minus other tasks inside it.
    """

    group: str
    worker: int
    start_s: float
    end_s: float
    cpu_s: float
    metrics: dict[str, float]


class Spent(_OfTask, tag="spent", frozen=True, kw_only=True, gc=False):
    """How the time of a finished group's samples was spent, or of all samples of a task without groups;
    `pipeline.record.spent` reads it.

    `samples` has a text per sample: when it began, and a letter, for one of the `names`, and a length for each part.
    `at_once` is how many samples of the worker are at most in a part at the same time, for parts with such a bound.
    """

    group: str
    worker: int
    names: tuple[str, ...]
    samples: tuple[str, ...]
    at_once: dict[str, int] = {}
    start_s: float
    end_s: float


class OpenSamples(msgspec.Struct, tag="open", frozen=True, kw_only=True, gc=False):
    """How many samples of a stage's running tasks are not finished, by the part of their time that they are in. Written
    when that has changed, at most once per second for each stage."""

    stage: str
    parts: dict[str, int]
    at_s: float


class Acknowledged(_OfTask, tag="acknowledged", frozen=True, kw_only=True, gc=False):
    """The driver took a report: the task has finished reading these groups, and its output for them is present."""

    at_s: float


class Trained(_OfTask, tag="trained", frozen=True, kw_only=True, gc=False):
    """What one rank trained on, read from the columns themselves.

    `version` is the version of the weights before the update. `samples`, `oldest` and `newest` (token versions) have
    one entry per group; `entries` counts the values of every per-token column.
    """

    worker: int
    version: int
    samples: tuple[int, ...]
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    entries: dict[str, int]
    at_s: float


class Retried(_OfTask, tag="retried", frozen=True, kw_only=True, gc=False):
    """An attempt was lost. Its groups are submitted again, and its late reports are ignored."""

    reason: str
    at_s: float


class Fenced(_OfTask, tag="fenced", frozen=True, kw_only=True, gc=False):
    """A report of an outdated attempt was ignored."""

    at_s: float


class Served(msgspec.Struct, tag="served", frozen=True, kw_only=True, gc=False):
    """A replica has a policy version before the transfer to all replicas is done: it may sample with it."""

    task: int
    stage: str
    step: int
    attempt: int
    replica: int
    version: int
    at_s: float


class Published(msgspec.Struct, tag="published", frozen=True, kw_only=True, gc=False):
    """A policy version was published; the target acknowledged the hash of the weights."""

    stage: str
    step: int
    version: int
    sha256: str
    at_s: float


class Cleared(msgspec.Struct, tag="cleared", frozen=True, kw_only=True, gc=False):
    """Rows were cleared after their last reader acknowledged: those of some partitions; with `last`, the groups' last.
    Without groups, rows of a lost attempt."""

    step: int
    groups: tuple[int, ...]
    partitions: tuple[str, ...] = ()
    last: bool = True
    start_s: float
    end_s: float


class Held(msgspec.Struct, tag="held", frozen=True, kw_only=True, gc=False):
    """The state of a checkpoint was copied, or written if the hosts have no room for a copy. Training waited until
    `end_s`."""

    step: int
    start_s: float
    end_s: float


class Checkpointed(msgspec.Struct, tag="checkpointed", frozen=True, kw_only=True, gc=False):
    """A checkpoint is complete on disk."""

    step: int
    folder: str
    size_bytes: int
    start_s: float
    end_s: float


class Removed(msgspec.Struct, tag="removed", frozen=True, kw_only=True, gc=False):
    """A checkpoint is about to be removed, because enough newer ones are complete."""

    step: int
    folder: str
    at_s: float


class StepEnded(msgspec.Struct, tag="step_ended", frozen=True, kw_only=True, gc=False):
    """Every stage has acknowledged the step. `metrics` is its line in metrics.jsonl.

    `driver_cpu_s` is the driver's CPU seconds so far, `processes_cpu_s` includes every process that it started; 0 if
    they were not measured at this step.
    """

    step: int
    metrics: dict[str, float]
    driver_cpu_s: float = 0.0
    processes_cpu_s: float = 0.0
    at_s: float


class Diverged(msgspec.Struct, tag="diverged", frozen=True, kw_only=True, gc=False):
    """The metrics of a step show a divergence of this kind for the first time. `value` is None if it is not finite,
    `before` is what it was in the steps before, if known. `problem` is the text that the run prints."""

    step: int
    kind: str
    metric: str
    value: float | None
    before: float | None
    problem: str
    at_s: float


class Stopping(msgspec.Struct, tag="stopping", frozen=True, kw_only=True, gc=False):
    """The run was asked to stop: it admits nothing and starts no training from here on."""

    at_s: float


class Failed(msgspec.Struct, tag="failed", frozen=True, kw_only=True, gc=False):
    """The run ended early."""

    stage: str | None
    step: int | None
    error: str
    problems: tuple[str, ...]
    at_s: float


class Ended(msgspec.Struct, tag="ended", frozen=True, kw_only=True, gc=False):
    """The run is over. `rows_left` counts rows in the data plane before the final sweep."""

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
    | Spent
    | OpenSamples
    | Acknowledged
    | Trained
    | Retried
    | Fenced
    | Published
    | Served
    | Cleared
    | Held
    | Checkpointed
    | Removed
    | StepEnded
    | Diverged
    | Stopping
    | Failed
    | Ended
)
BLOCK = 1 << 16  # bytes per read
_DECODER = msgspec.json.Decoder(TraceEvent)
SKIMMED_BYTES = 1 << 20  # at a time
_HEAD = b'{"type":"'  # of a line; its tag follows
_RAN = _HEAD + b'ran"'
_ACKNOWLEDGED = re.compile(_HEAD + rb'acknowledged","task":\d+,"stage":"([^"]*)"')  # the beginning of such a line
_KINDS: dict[bytes, type] = {str(kind.__struct_config__.tag).encode(): kind for kind in get_args(TraceEvent)}


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that are finite numbers: JSON has no others."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class TraceWriter:
    """Appends events. `flush` passes the queued lines to the operating system.

    An incomplete last line of a killed run is truncated. If the disk is full or fails, `flush` and `close` raise
    CheckpointError, and nothing more is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: BufferedWriter | None = None
        if path:
            with recording(path):
                self._file = private(path).open("ab")
                self._file.truncate(whole_lines(path))
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()

    def write(self, event: TraceEvent) -> None:
        """Queue one event."""
        if self._file:
            self._buffer += self._encoder.encode(event)
            self._buffer += b"\n"

    def flush(self) -> None:
        """Pass the queued lines to the operating system."""
        if self._file and self._buffer:
            with self._writing() as file:
                file.write(self._buffer)
                file.flush()
            self._buffer.clear()

    def close(self) -> None:
        """Flush, sync to disk, close. Idempotent."""
        self.flush()
        if self._file:
            with self._writing() as file:
                os.fsync(file.fileno())
            file.close()
            self._file = None

    @contextmanager
    def _writing(self) -> Iterator[BufferedWriter]:
        assert self._file is not None
        with recording(self._file.name):
            try:
                yield self._file
            except OSError:
                file, self._file = self._file, None
                with suppress(OSError):
                    file.close()
                raise


def whole_lines(path: Path) -> int:
    """Return the size of a file up to its last complete line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in range((size - 1) // BLOCK * BLOCK, -1, -BLOCK):
            file.seek(start)
            newline = file.read(min(BLOCK, size - start)).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
    return 0


def read(path: Path, offset: int = 0) -> Iterator[tuple[int, TraceEvent]]:
    """Yield the events of complete lines from byte `offset`, each with the offset at which to continue.

    A last line without newline is still being written and is left for the next call. Raises msgspec.DecodeError for
    a line that is not an event.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield offset, _decoded(line)


class Skimmed(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a part of a record up to byte `offset`, each with the byte where it begins. `ran` is the number of
    lines of tasks that are not among them."""

    offset: int
    events: list[tuple[int, TraceEvent]]
    ran: int


def skim(path: Path, offset: int, until: int, kinds: frozenset[type], *, ends: bool = False) -> Skimmed:
    """Read some complete lines from byte `offset`, none after byte `until`, and decode only those of some kinds: that
    is most of the time of reading. `ends` also decodes the last Acknowledged of each stage. If there is no line,
    `offset` stays."""
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read(max(0, min(SKIMMED_BYTES, until - offset)))
        if len(block) == SKIMMED_BYTES and b"\n" not in block:
            block += file.readline()
    block = block[: block.rfind(b"\n") + 1]
    passed = tuple(_HEAD + tag + b'"' for tag, kind in _KINDS.items() if kind not in kinds)
    events, at = [], 0
    for line in [line for line in block.split(b"\n")[:-1] if not line.startswith(passed)]:
        at = block.index(line, at)
        events.append((offset + at, _decoded(line)))
        at += len(line)
    if ends:
        last = {found[1]: found.start() for found in _ACKNOWLEDGED.finditer(block)}.values()
        events += [(offset + at, _decoded(block[at : block.index(b"\n", at)])) for at in last]
        events.sort(key=itemgetter(0))
    return Skimmed(offset=offset + len(block), events=events, ran=0 if Ran in kinds else block.count(_RAN))


def lines_at(path: Path, begins: Sequence[int], kinds: frozenset[type]) -> list[tuple[int, TraceEvent]]:
    """Decode the lines that begin at these bytes, if they are of some kinds."""
    heads = tuple(_HEAD + tag + b'"' for tag, kind in _KINDS.items() if kind in kinds)
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as record:
        lines = [(begin, record[begin : record.find(b"\n", begin)]) for begin in begins]
    return [(begin, _decoded(line)) for begin, line in lines if line.startswith(heads)]


def _decoded(line: bytes) -> TraceEvent:
    try:
        return _DECODER.decode(line)
    except (UnicodeDecodeError, RecursionError):
        return decode(line, _DECODER)  # raises a DecodeError that says why
