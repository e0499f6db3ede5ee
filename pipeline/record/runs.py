"""Reads runs from disk in any state: live, finished, failed, killed or resumed.

    run = open_run(Path("runs/quickstart-..."))
    report = analyse(run.events, run.plan)
    for summary in list_runs(Path("runs")): print(summary.name, summary.state, summary.step)

An incomplete last line is skipped. Nothing here writes.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import GraphError, Problem, message_of, shown
from pipeline.plan.plan import Plan
from pipeline.plan.recorded import contradictions
from pipeline.reading import check_file, decode, readable
from pipeline.record import trace
from pipeline.record.history import last_run
from pipeline.rundir import RunDir

Metrics = dict[
    str, Any
]  # a line of metrics.jsonl: "step", counted from 1 (0 is before the first), "version", and values
UNFINISHED, UNREADABLE = "unfinished", "unreadable"
LARGEST = 10**18  # a step
LAST_BYTES = 1 << 20  # read from the end of a file to find its last line


class OpenedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded run directory. `events` are those since the run was last started or resumed; `described` is run.json,
    empty if missing; `state` comes from `state_of`."""

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
    """A run in a list. `step` is the last step with metrics, out of `steps`; None if unknown. The state of a folder
    that this user may not read is "unreadable"; it may hold no run."""

    name: str
    path: Path
    graph: str
    started: str
    state: str
    step: int
    steps: int | None


def open_run(path: Path, *, recent_bytes: int | None = None) -> OpenedRun:
    """Load a run directory; of a longer record only the last `recent_bytes` and its worker placements.

    Raises GraphError if it is not a run directory, or a file in it was written by another version.
    """
    run_dir = run_directory(path)
    planned = open_plan(path)
    with of_a_run(run_dir.events):
        events = _events(run_dir.events, recent_bytes)
    with of_a_run(run_dir.metrics):
        metrics = list(read_metrics(run_dir.metrics))
    described = run_json(path)
    return OpenedRun(
        path=path, plan=planned, events=events, metrics=metrics, described=described,
        state=state_of(events[-1] if events else None),
    )  # fmt: skip


def run_directory(path: Path) -> RunDir:
    """The run directory at a path. Raises GraphError if there is none, or it has no record."""
    run_dir = RunDir(path)
    for file in (run_dir.plan, run_dir.events):
        with of_a_run(file):
            is_there = file.is_file()
        if not is_there:
            raise GraphError(
                Problem(
                    where=str(path),
                    what=f"{file.name} does not exist",
                    why="a run is read from its directory",
                    fix="name a run directory",
                )
            )
    return run_dir


def open_plan(path: Path) -> Plan:
    """Read the plan of a run directory. Raises GraphError if it cannot be read."""
    file = RunDir(path).plan
    with of_a_run(file):
        planned = decode(file.read_bytes(), Plan)
        if wrong := next(contradictions(planned), None):
            raise ValueError(wrong)
        return planned


def of_a_run(file: Path) -> AbstractContextManager[None]:
    """Turn the errors of reading a file of a run into a GraphError."""
    fix = "read it with the version that run.json names"
    return readable(file, GraphError, why="a run of this version wrote it", fix=fix)


@contextmanager
def consistent(path: Path) -> Iterator[None]:
    """Turn an error of code that computes with the events of a run directory into a GraphError. Each line of the record
    can be read, and what they say together cannot be."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise GraphError(
            Problem(
                where=str(RunDir(path).events),
                what=f"its events contradict each other or plan.json: {message_of(error)} ({Path(last.filename).name}:"
                f"{last.lineno})",
                why="a run of this version wrote both files",
                fix="restore both from a copy",
            )
        ) from error


def _events(path: Path, recent_bytes: int | None) -> list[trace.TraceEvent]:
    """Return the events since the last start, or the most recent ones plus the worker placements."""
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
    """Return the state of a run by its last event: "finished", "failed", "interrupted" (by a signal), or "unfinished"
    (still running, or killed)."""
    if isinstance(last, trace.Ended):
        return "finished"
    if isinstance(last, trace.Failed):
        return "failed" if last.problems else "interrupted"
    return UNFINISHED


def list_runs(folder: Path) -> list[RunSummary]:
    """Return the runs in a folder, newest first; reads only the ends of their files. Raises GraphError if the folder
    cannot be read."""
    with readable(folder, GraphError, why="the runs in it are listed", fix="name another folder"):
        paths = [*folder.iterdir()] if folder.is_dir() else []
    found = [summary for path in paths if (summary := _summary(path))]
    return sorted(found, key=lambda run: (run.started, run.name), reverse=True)


def read_metrics(path: Path, offset: int = 0) -> Iterator[Metrics]:
    """Yield complete lines of metrics.jsonl from byte `offset`; none without a file. Raises msgspec.DecodeError."""
    return (line for _, line in tail_metrics(path, offset))


def tail_metrics(path: Path, offset: int = 0) -> Iterator[tuple[int, Metrics]]:
    """Yield the same lines, each with the offset at which to continue reading."""
    if path.is_file():
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if line.endswith(b"\n"):
                    offset += len(line)
                    yield offset, _metrics(line)


def _metrics(line: bytes) -> Metrics:
    found: Metrics = decode(line, Metrics)
    if type(found.get("step")) is not int or not 0 <= found["step"] <= LARGEST:
        raise msgspec.ValidationError(f"a line has step {shown(found.get('step'))}")
    return found


def run_json(path: Path) -> dict[str, Any]:
    """Return the contents of run.json; empty if missing or unreadable."""
    file = RunDir(path).run_json
    try:
        return decode(file.read_bytes(), dict[str, Any]) if file.is_file() else {}
    except (msgspec.DecodeError, OSError):
        return {}


def described_run(path: Path) -> dict[str, Any]:
    """Return the contents of run.json. Raises GraphError if `path` is not a run directory, or a file of its record is a
    pipe, which who opens it may wait for."""
    run_dir = RunDir(path)
    for file in (run_dir.run_json, run_dir.metrics, run_dir.events):
        with of_a_run(file):
            check_file(file)
    if found := run_json(path):
        return found
    raise GraphError(
        Problem(
            where=str(path),
            what="run.json is missing or cannot be read",
            why="it describes the run",
            fix="name a folder that a run created",
        )
    )


def state_on_disk(events: Path) -> str:
    """Return `state_of` of a record; reads only its end."""
    line = _last_line(events)
    try:
        return state_of(msgspec.convert(line, type=trace.Ended | trace.Failed) if line else None)
    except msgspec.ValidationError:
        return UNFINISHED


def add_end(events: Path, steps: int) -> None:
    """Add the end that a killed run did not record, at the time of its last event."""
    last = _last_line(events) or {}
    pen = trace.TraceWriter(events)
    pen.write(trace.Ended(steps=steps, rows_left=0, at_s=max(last.get("at_s", 0.0), last.get("end_s", 0.0))))
    pen.close()


def _summary(path: Path) -> RunSummary | None:
    """Return the summary of a folder; None if it holds no run."""
    run_dir = RunDir(path)
    try:
        if not run_dir.run_json.exists():
            return None
        if run_dir.run_json.is_file():
            with run_dir.run_json.open("rb"):
                pass
    except OSError:
        return RunSummary(name=path.name, path=path, graph="", started="", state=UNREADABLE, step=0, steps=None)
    described = run_json(path)
    steps = None
    if run_dir.plan.is_file():
        try:
            steps = decode(run_dir.plan.read_bytes(), _PlanSteps).steps
        except (msgspec.DecodeError, OSError):
            steps = None
    last_line = _last_line(run_dir.metrics)
    step = last_line.get("step") if isinstance(last_line, dict) else None
    return RunSummary(
        name=path.resolve().name,
        path=path,
        graph=str(described.get("graph", "")),
        started=str(described.get("started", "")),
        state=state_on_disk(run_dir.events),
        step=step if type(step) is int else 0,
        steps=steps,
    )


def _last_line(path: Path) -> Any:
    """Return the last complete line of a file, decoded; None if there is none or it is not JSON."""
    if not path.is_file():
        return None
    try:
        end = trace.whole_lines(path)
        with path.open("rb") as file:
            file.seek(max(0, end - LAST_BYTES))
            line = file.read(min(end, LAST_BYTES)).removesuffix(b"\n").rpartition(b"\n")[2]
        return decode(line, Any) if line else None
    except (msgspec.DecodeError, OSError):
        return None


class _PlanSteps(msgspec.Struct):
    """The part of plan.json that a list of runs needs."""

    steps: int
