"""Runs as they lie on disk, read whatever became of them: live, finished, failed, killed or resumed.

    run = open_run(Path("runs/quickstart-..."))
    report = analyse(run.events, run.plan)
    for summary in list_runs(Path("runs")): print(summary.name, summary.state, summary.step)

A last line that is still being written is left out. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import GraphError, Problem
from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.record.history import last_run
from pipeline.rundir import RunDir

Metrics = dict[
    str, Any
]  # a line of metrics.jsonl: "step", counted from 1 (0 is before the first), "version", and values
UNFINISHED = "unfinished"
LAST_BYTES = 1 << 20  # in which the last line of a file is looked for


class OpenedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run directory, read. `events` are those since the run was last started or resumed; `described` is run.json,
    empty where it is not there; `state` is that of `state_of`."""

    path: Path
    plan: Plan
    events: list[trace.TraceEvent]
    metrics: list[Metrics]
    described: dict[str, Any]
    state: str

    @property
    def name(self) -> str:
        return self.path.resolve().name


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a list of runs. `step` is the last whose numbers are there, of `steps`; None where that is not known."""

    name: str
    path: Path
    graph: str
    started: str
    state: str
    step: int
    steps: int | None


def open_run(path: Path, *, recent_bytes: int | None = None) -> OpenedRun:
    """Read a run directory; of a longer record only the last `recent_bytes`, and where its workers are.

    Raises GraphError where it is none, or where a file in it is no record of this version.
    """
    run_dir = RunDir(path)
    for file in (run_dir.plan, run_dir.events):
        if not file.is_file():
            raise GraphError(
                Problem(
                    where=str(path),
                    what=f"{file.name} is not there",
                    why="what a run was is read from its directory",
                    fix="name a folder that a run made",
                )
            )
    file = run_dir.plan
    try:
        planned = msgspec.json.decode(file.read_bytes(), type=Plan)
        file = run_dir.events
        events = _events(file, recent_bytes)
        file = run_dir.metrics
        metrics = list(read_metrics(file))
    except msgspec.DecodeError as error:
        raise GraphError(
            Problem(
                where=str(file),
                what=f"it cannot be read: {error}",
                why="a run of this version wrote it",
                fix="look at it with the version that run.json names",
            )
        ) from error
    described = run_json(path)
    return OpenedRun(
        path=path, plan=planned, events=events, metrics=metrics, described=described,
        state=state_of(events[-1] if events else None),
    )  # fmt: skip


def _events(path: Path, recent_bytes: int | None) -> list[trace.TraceEvent]:
    """The events since the run was last started, or the last ones of them behind the placement of its workers."""
    size = path.stat().st_size
    if recent_bytes is None or size <= recent_bytes:
        return last_run(event for _, event in trace.read(path))
    begun = takewhile(lambda event: not isinstance(event, trace.Submitted), (event for _, event in trace.read(path)))
    with path.open("rb") as file:
        file.seek(size - recent_bytes)
        file.readline()
        start = file.tell()
    return last_run(chain(begun, (event for _, event in trace.read(path, start))))


def state_of(last: trace.TraceEvent | None) -> str:
    """What became of a run, by its last event: "finished", "failed", "interrupted" (by a signal), or "unfinished": it
    runs still, or was killed."""
    if isinstance(last, trace.Ended):
        return "finished"
    if isinstance(last, trace.Failed):
        return "failed" if last.problems else "interrupted"
    return UNFINISHED


def list_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder, the one that was started last first; of each only the ends of its files are read."""
    found = [_summary(path.parent) for path in folder.glob("*/run.json")] if folder.is_dir() else []
    return sorted(found, key=lambda run: (run.started, run.name), reverse=True)


def read_metrics(path: Path, offset: int = 0) -> Iterator[Metrics]:
    """Whole lines of metrics.jsonl from byte `offset` on; none where there is no file. Raises msgspec.DecodeError."""
    return (line for _, line in tail_metrics(path, offset))


def tail_metrics(path: Path, offset: int = 0) -> Iterator[tuple[int, Metrics]]:
    """The same, each with the offset behind it: where to go on reading."""
    if path.is_file():
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if line.endswith(b"\n"):
                    offset += len(line)
                    yield offset, msgspec.json.decode(line, type=Metrics)


def run_json(path: Path) -> dict[str, Any]:
    """What run.json says; nothing where it is not there, or cannot be read."""
    file = RunDir(path).run_json
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.is_file() else {}
    except msgspec.DecodeError:
        return {}


def state_on_disk(events: Path) -> str:
    """`state_of` a record, of which only the end is read."""
    line = _last_line(events)
    try:
        return state_of(msgspec.convert(line, type=trace.Ended | trace.Failed) if line else None)
    except msgspec.ValidationError:
        return UNFINISHED


def _summary(path: Path) -> RunSummary:
    run_dir = RunDir(path)
    described = run_json(path)
    steps = None
    if run_dir.plan.is_file():
        try:
            steps = msgspec.json.decode(run_dir.plan.read_bytes(), type=_Steps).steps
        except msgspec.DecodeError:
            steps = None
    last_line = _last_line(run_dir.metrics)
    return RunSummary(
        name=path.resolve().name,
        path=path,
        graph=str(described.get("graph", "")),
        started=str(described.get("started", "")),
        state=state_on_disk(run_dir.events),
        step=int(last_line.get("step", 0)) if isinstance(last_line, dict) else 0,
        steps=steps,
    )


def _last_line(path: Path) -> Any:
    """The last whole line of a file, decoded; None where there is none, or it is no JSON."""
    if not path.is_file():
        return None
    end = trace.whole_lines(path)
    with path.open("rb") as file:
        file.seek(max(0, end - LAST_BYTES))
        line = file.read(min(end, LAST_BYTES)).removesuffix(b"\n").rpartition(b"\n")[2]
    try:
        return msgspec.json.decode(line) if line else None
    except msgspec.DecodeError:
        return None


class _Steps(msgspec.Struct):
    """What a list of runs reads of plan.json."""

    steps: int
