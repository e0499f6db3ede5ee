"""`python -m pipeline.export RUN --perfetto FILE --csv FOLDER`: a run for other tools.

--perfetto writes Chrome's trace format, which ui.perfetto.dev and chrome://tracing open: a track a worker (more where
it has streams that overlap), the critical path, the driver, and counters of groups present, version and staleness.
--csv writes spans.csv, metrics.csv, path.csv and gaps.csv. RUN may be live, finished, failed or killed; all starts of a
resumed run are exported, critical path and gaps of the last. Exit codes: 0 done; 2 RUN, a flag or a file is wrong.

    python -m pipeline.export runs/quickstart-... --perfetto trace.json --csv tables

The functions yield text piece by piece, and read the record as they go:

    for piece in perfetto(Path("runs/quickstart-...")): response.write(piece.encode())
    for name, table in tables(run).items(): (folder / name).write_text("".join(table))
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline import trace
from pipeline.command import Parser, exit_code
from pipeline.errors import GraphError, Problem
from pipeline.findings import Findings, find
from pipeline.perfetto import Starts, perfetto
from pipeline.rundir import RunDir
from pipeline.runs import open_run, read_metrics

__all__ = ["main", "metrics_csv", "perfetto", "spans_csv", "tables"]
SPANS = ("start", "task", "stage", "step", "attempt", "group", "worker", "start_s", "end_s", "cpu_s", "groups")
PATH = ("step", "stage", "cause", "field", "task", "group", "worker", "start_s", "end_s")
GAPS = ("group", "worker", "cause", "stage", "field", "task", "start_s", "end_s")


def tables(run: Path) -> dict[str, Iterator[str]]:
    """The tables of a run by file name, as lines of CSV. Steps are counted from 1, and times are seconds since the run
    was first started. Raises GraphError where `run` is no run directory."""
    opened = open_run(run)
    found, since = find(opened), Starts.of(run)
    return {
        "spans.csv": spans_csv(run),
        "metrics.csv": metrics_csv(run),
        "path.csv": _lines(PATH, _path_rows(found, since)),
        "gaps.csv": _lines(GAPS, _gap_rows(found, since)),
    }


def spans_csv(run: Path) -> Iterator[str]:
    """Every task on every worker, a line each; `start` counts how often the run was started before, `cpu_s` are CPU
    seconds and `groups` a number of groups."""
    return _lines(SPANS, _span_rows(run))


def metrics_csv(run: Path) -> Iterator[str]:
    """The lines of metrics.jsonl, with a column for every name that is in any of them."""
    file = RunDir(run).metrics
    names = list(dict.fromkeys(name for line in read_metrics(file) for name in line))
    return _lines(names, ([line.get(name, "") for name in names] for line in read_metrics(file)))


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
                path.step + 1, span.stage, span.cause, span.field, span.task, span.group, span.worker,
                clock.seconds(span.start_s), clock.seconds(span.end_s),
            )  # fmt: skip


def _gap_rows(found: Findings, clock: Starts) -> Iterator[Sequence[Any]]:
    for gap in found.gaps:
        yield (
            gap.group, gap.worker, gap.cause, gap.stage, gap.field, gap.task,
            clock.seconds(gap.start_s), clock.seconds(gap.end_s),
        )  # fmt: skip


def _lines(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Lines of CSV, the names first; what is None is empty."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.run is None or not (options.perfetto or options.csv):
        raise GraphError(
            Problem(
                where="command line",
                what="no run is named" if options.run is None else "no format is named",
                why="a run is written as a trace for Perfetto, or as tables",
                fix="python -m pipeline.export runs/quickstart-... --perfetto trace.json",
            )
        )
    run = Path(options.run)
    if options.perfetto:
        _write(Path(options.perfetto), perfetto(run), f"--perfetto {options.perfetto}")
    if options.csv:
        for name, table in tables(run).items():
            _write(Path(options.csv) / name, table, f"--csv {options.csv}")
    return 0


def _write(path: Path, pieces: Iterator[str], flag: str) -> None:
    first = next(pieces)  # which raises where there is no such run, before anything is written
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(first)
            file.writelines(pieces)
    except OSError as error:
        raise GraphError(
            Problem(
                where=flag,
                what=f"{path} cannot be written: {error.strerror}",
                why="the export is a new file",
                fix="another path",
            )
        ) from error
    print(f"{path}: {path.stat().st_size:,} bytes")


def _parser() -> Parser:
    parser = Parser(prog="python -m pipeline.export", allow_abbrev=False)
    parser.graph_file = "RUN"
    parser.epilog = "exit codes: 0 done; 2 RUN, a flag or a file is wrong"
    parser.add_argument("run", nargs="?", help="a run directory")
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace that ui.perfetto.dev opens")
    parser.add_argument("--csv", metavar="FOLDER", help="write spans.csv, metrics.csv, path.csv and gaps.csv there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
