"""Exports a run as CSV: spans, metrics, critical path and gaps."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.analysis.findings import Findings, find
from pipeline.analysis.perfetto import Starts
from pipeline.record import trace
from pipeline.record.runs import of_a_run, open_run, read_metrics
from pipeline.rundir import RunDir

SPANS = ("start", "task", "stage", "step", "attempt", "group", "worker", "start_s", "end_s", "cpu_s", "groups")
PATH = ("step", "stage", "part", "cause", "field", "task", "group", "worker", "start_s", "end_s")
TABLES = ("spans.csv", "metrics.csv", "path.csv", "gaps.csv")
GAPS = ("group", "worker", "cause", "stage", "field", "task", "start_s", "end_s")


def tables(run: Path) -> dict[str, Iterator[str]]:
    """Return the tables of a run by file name, as CSV lines. Steps count from 1; times are seconds since the run first
    started. Raises GraphError if `run` is not a run directory."""
    opened = open_run(run)
    found, since = find(opened), Starts.of(run)
    path, gaps = _lines(PATH, _path_rows(found, since)), _lines(GAPS, _gap_rows(found, since))
    return dict(zip(TABLES, (spans_csv(run), metrics_csv(run), path, gaps), strict=True))


def spans_csv(run: Path) -> Iterator[str]:
    """Yield one line per task and worker; `start` counts earlier starts of the run, `cpu_s` is CPU seconds, `groups` a
    count. Raises GraphError if the record is damaged."""
    with of_a_run(RunDir(run).events):
        yield from _lines(SPANS, _span_rows(run))


def metrics_csv(run: Path) -> Iterator[str]:
    """Yield the lines of metrics.jsonl, with one column per metric name. Raises GraphError if it is damaged."""
    file = RunDir(run).metrics
    with of_a_run(file):
        names = list(dict.fromkeys(name for line in read_metrics(file) for name in line))
        yield from _lines(names, ([line.get(name, "") for name in names] for line in read_metrics(file)))


def _span_rows(run: Path) -> Iterator[Sequence[Any]]:
    clock = Starts()
    for _, event in trace.read(RunDir(run).events):
        if isinstance(event, trace.Started):
            clock.start(event)
        elif isinstance(event, trace.Ran):
            yield (
                clock.number, event.task, event.stage, event.step + 1, event.attempt, event.group, event.worker,
                clock.seconds(event.start_s), clock.seconds(event.end_s), event.cpu_s, len(event.groups),
            )  # fmt: skip


def _path_rows(found: Findings, clock: Starts) -> Iterator[Sequence[Any]]:
    for path in found.paths:
        for span in path.spans:
            yield (
                path.step + 1, span.stage, span.part, span.cause, span.field, span.task, span.group, span.worker,
                clock.seconds(span.start_s), clock.seconds(span.end_s),
            )  # fmt: skip


def _gap_rows(found: Findings, clock: Starts) -> Iterator[Sequence[Any]]:
    for gap in found.gaps:
        yield (
            gap.group, gap.worker, gap.cause, gap.stage, gap.field, gap.task,
            clock.seconds(gap.start_s), clock.seconds(gap.end_s),
        )  # fmt: skip


def _lines(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield CSV lines, header first; None becomes empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(row)
        if buffer.tell() >= trace.BLOCK:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()
