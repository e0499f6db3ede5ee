"""Exports a run in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.

    for piece in perfetto(Path("runs/quickstart-...")): file.write(piece)

A worker group becomes a process and a worker a thread; overlapping tasks of a worker, such as streams, get extra
threads. Times are microseconds since the run first started. The record is streamed twice; only task times are kept in
memory, for the layout.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipeline.analysis.critical_path import StepPath, step_paths
from pipeline.record import trace
from pipeline.record.history import Tasks, step_ends
from pipeline.record.runs import open_run
from pipeline.rundir import RunDir

RUN = 1  # the process for everything outside workers
PATH, DRIVER = 1, 2  # its threads
FIRST_GROUP = 2  # the process of the first worker group
THREADS = 64  # threads per worker: its own, and those for overlapping tasks
PIECE = 1 << 16  # approximate characters per piece


class Starts:
    """Converts the times of a record to seconds since the run first started. The wall clock connects resumed parts,
    because the monotonic clock restarts with the machine."""

    def __init__(self) -> None:
        self.number = -1  # of the current start
        self._first_wall_s: float | None = None
        self._offset_s = 0.0

    @staticmethod
    def of(run: Path) -> Starts:
        """Return the clock of a run, at its last start."""
        starts = Starts()
        for _, event in trace.read(RunDir(run).events):
            if isinstance(event, trace.Started):
                starts.start(event)
        return starts

    def start(self, event: trace.Started) -> None:
        """Record that the run was started or resumed."""
        self.number += 1
        if self._first_wall_s is None:
            self._first_wall_s = event.wall_s
        self._offset_s = event.wall_s - self._first_wall_s - event.monotonic_s

    def seconds(self, at_s: float) -> float:
        """Convert a monotonic time of the current start."""
        return at_s + self._offset_s


def perfetto(run: Path) -> Iterator[str]:
    """Yield a JSON object with the list `traceEvents` in pieces. Raises GraphError if `run` is not a run directory."""
    opened = open_run(run)
    tasks = Tasks(opened.events)
    paths = step_paths(opened.plan, tasks, step_ends(tasks))
    groups = {group.name: FIRST_GROUP + place for place, group in enumerate(opened.plan.groups)}
    name = opened.name
    del opened, tasks  # the record is read again while writing
    lanes = _lanes(run)
    events = _Events(run, groups, lanes)
    return _joined(events.named(name), events.of_record(), events.of_path(paths))


def _joined(*parts: Iterable[dict[str, Any]]) -> Iterator[str]:
    encoder = msgspec.json.Encoder()
    piece = ['{"displayTimeUnit":"ms","traceEvents":[']
    size, between = 0, "\n"
    for part in parts:
        for event in part:
            text = encoder.encode(event).decode()
            piece += (between, text)
            size, between = size + len(text), ",\n"
            if size >= PIECE:
                yield "".join(piece)
                piece, size = [], 0
    yield "".join([*piece, "\n]}\n"])


def _lanes(run: Path) -> dict[tuple[int, int, str, int], int]:
    """Return the threads of tasks that are not on their worker's first thread, by start, task, group and worker."""
    spans: dict[tuple[str, int], list[tuple[float, float, int, int]]] = defaultdict(list)
    starts = Starts()
    for _, event in trace.read(RunDir(run).events):
        if isinstance(event, trace.Started):
            starts.start(event)
        elif isinstance(event, trace.Ran):
            times = starts.seconds(event.start_s), starts.seconds(event.end_s)
            spans[event.group, event.worker].append((*times, starts.number, event.task))
    lanes = {}
    for (group, worker), found in spans.items():
        free: list[int] = []  # free threads, lowest first
        used: list[tuple[float, int]] = []  # when a thread becomes free
        for start_s, end_s, number, task in sorted(found):
            while used and used[0][0] <= start_s:
                heapq.heappush(free, heapq.heappop(used)[1])
            lane = heapq.heappop(free) if free else len(used)
            heapq.heappush(used, (end_s, lane))
            if lane:
                lanes[number, task, group, worker] = lane
    return lanes


class _Events:
    """The trace events of a run."""

    def __init__(self, run: Path, groups: dict[str, int], lanes: dict[tuple[int, int, str, int], int]) -> None:
        self._run, self._groups, self._lanes = run, groups, lanes
        self._starts = Starts()
        self._present: set[int] = set()

    def named(self, run: str) -> Iterator[dict[str, Any]]:
        """Yield the names of the processes and of the run's own threads."""
        yield _name("process_name", RUN, 0, run)
        yield _name("thread_name", RUN, PATH, "critical path")
        yield _name("thread_name", RUN, DRIVER, "driver")
        for group, process in self._groups.items():
            yield _name("process_name", process, 0, group)

    def of_record(self) -> Iterator[dict[str, Any]]:
        """Yield the events in record order."""
        threads: set[tuple[int, int]] = set()
        for _, event in trace.read(RunDir(self._run).events):
            match event:
                case trace.Started():
                    self._starts.start(event)
                    self._present.clear()
                    yield self._instant("resumed" if event.start else "started", event.monotonic_s)
                case trace.Ran():
                    process, thread = self._groups.get(event.group, RUN), self._thread(event)
                    if (process, thread) not in threads:
                        threads.add((process, thread))
                        lane = thread % THREADS
                        yield _name(
                            "thread_name", process, thread, f"{event.group} {event.worker}" + f" +{lane}" * bool(lane)
                        )
                    yield self._slice(event.stage, process, thread, event.start_s, event.end_s, _arguments(event))
                case trace.Turned():
                    what = "reclaims its GPU memory" if event.awake else "frees its GPU memory"
                    thread = event.worker * THREADS + THREADS - 1
                    process, used = self._groups.get(event.group, RUN), {"memory_bytes": event.memory_bytes}
                    yield self._slice(what, process, thread, event.start_s, event.end_s, used)
                case trace.Held():
                    yield self._slice("copy for a checkpoint", RUN, DRIVER, event.start_s, event.end_s, {})
                case trace.Checkpointed():
                    message = {"folder": event.folder, "size_bytes": event.size_bytes}
                    yield self._slice("checkpoint", RUN, DRIVER, event.start_s, event.end_s, message)
                case trace.Published():
                    yield self._instant(f"version {event.version}", event.at_s)
                    yield self._counter("policy version", event.at_s, event.version)
                case trace.Diverged():
                    yield self._instant(f"diverged: {event.metric}", event.at_s)
                case trace.Stopping():
                    yield self._instant("asked to stop", event.at_s)
                case trace.Failed():
                    yield self._instant(f"failed: {event.error}", event.at_s)
                case trace.Trained():
                    oldest = min(event.oldest, default=event.version)
                    yield self._counter("staleness, versions", event.at_s, event.version - oldest)
                case trace.Admitted():
                    self._present.update(event.groups)
                    yield self._counter("groups present", event.at_s, len(self._present))
                case trace.Cleared(last=True):
                    self._present.difference_update(event.groups)
                    yield self._counter("groups present", event.end_s, len(self._present))

    def of_path(self, paths: Iterable[StepPath]) -> Iterator[dict[str, Any]]:
        """Yield the critical path of the last start as consecutive slices."""
        for path in paths:
            for span in path.spans:
                message = {"step": path.step + 1, "cause": span.cause, "field": span.field, "task": span.task}
                name = f"{span.stage}: {span.part}" if span.part else span.stage
                yield self._slice(name, RUN, PATH, span.start_s, span.end_s, message)

    def _thread(self, event: trace.Ran) -> int:
        lane = self._lanes.get((self._starts.number, event.task, event.group, event.worker), 0)
        return event.worker * THREADS + min(lane, THREADS - 2)

    def _micros(self, at_s: float) -> float:
        return round(1e6 * self._starts.seconds(at_s), 3)

    def _slice(
        self, name: str, process: int, thread: int, start_s: float, end_s: float, message: dict[str, Any]
    ) -> dict[str, Any]:
        start = self._micros(start_s)
        took = max(0.0, round(self._micros(end_s) - start, 3))
        return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": start, "dur": took, "args": message}

    def _instant(self, name: str, at_s: float) -> dict[str, Any]:
        return {"ph": "i", "s": "p", "name": name, "pid": RUN, "tid": DRIVER, "ts": self._micros(at_s)}

    def _counter(self, name: str, at_s: float, value: float) -> dict[str, Any]:
        return {"ph": "C", "name": name, "pid": RUN, "ts": self._micros(at_s), "args": {"value": value}}


def _arguments(event: trace.Ran) -> dict[str, Any]:
    return {
        "step": event.step + 1, "task": event.task, "attempt": event.attempt, "groups": len(event.groups),
        "cpu_s": event.cpu_s, **event.metrics,
    }  # fmt: skip


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
