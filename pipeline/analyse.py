"""`python -m pipeline.analyse RUN [flags]`: why a step takes as long as it does, from the record of a run.

Prints what bounds a step, the seconds of the critical path by stage and the slack of each stage, why workers had no
task, and what would make a step faster. RUN may be live, finished, failed or killed. --step shows one step, --compare
two runs side by side. Exit codes: 0 done; 2 RUN or a flag is wrong.

    python -m pipeline.analyse runs/quickstart-...
    python -m pipeline.analyse runs/quickstart-... --step 12 --json
    python -m pipeline.analyse runs/quickstart-... --compare runs/grpo_async-...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.analysis.comparison import Comparison, Pair, compare
from pipeline.analysis.critical_path import mean_parts
from pipeline.analysis.episodes import EpisodeTimes
from pipeline.analysis.findings import Findings, find
from pipeline.analysis.idle import Idle
from pipeline.analysis.report import summary
from pipeline.cli import console
from pipeline.cli.command import Parser, exit_code, whole
from pipeline.cli.listing import example
from pipeline.errors import GraphError, Problem
from pipeline.precedence import typed
from pipeline.record import trace
from pipeline.record.runs import OpenedRun, consistent, open_run
from pipeline.simulation.hints import Hints, hints
from pipeline.simulation.recording import recording_of

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 4  # causes per worker group
WORTH = 0.005  # share of the time below which a cause is not shown


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    _check(options)
    run = open_run(Path(options.run))
    with consistent(run.path):
        return _analyse(run, options)


def _analyse(run: OpenedRun, options: argparse.Namespace) -> int:
    if options.compare:
        comparison = compare(run, open_run(Path(options.compare)))
        if options.json:
            print(msgspec.json.encode(comparison).decode())
        else:
            _print_comparison(comparison)
        return 0
    found = find(run, step=None if options.step is None else options.step - 1)
    advice, notes = _hints(run, found) if options.step is None else (None, [])
    if options.json:
        print(msgspec.json.encode(as_json(run, found, advice, notes, gaps=options.step is not None)).decode())
    else:
        _print(run, found, advice, notes, options.step)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog=" ".join(typed("pipeline.analyse")),
        usage="%(prog)s RUN [flags]",
        epilog="exit codes: 0 done; 2 RUN or a flag is wrong",
    )
    parser.graph_file = "RUN"
    parser.add_argument("run", nargs="?", help="a run directory")
    parser.add_argument("--step", type=whole, metavar="N", help="one step, counted from 1 as in metrics.jsonl")
    parser.add_argument("--compare", metavar="OTHER", help="another run directory, to compare with RUN")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _check(options: argparse.Namespace) -> None:
    if options.run is None:
        raise GraphError(
            Problem(
                where="command line",
                what="no run is named",
                why="the analysis reads the record of a run directory",
                fix=" ".join([*typed("pipeline.analyse"), example()]),
            )
        )
    if options.step is not None and options.compare:
        raise GraphError(
            Problem(
                where="--step --compare",
                what="both flags are given",
                why="runs are compared over all their steps",
                fix="use one of the two",
            )
        )


def _hints(run: OpenedRun, found: Findings) -> tuple[Hints | None, list[str]]:
    """Return the hints, or why there are none."""
    try:
        return hints(recording_of(run), run.path, measured=found.report), []
    except GraphError as error:
        return None, [f"no hints: {problem.what}" for problem in error.problems]


def as_json(
    run: OpenedRun, found: Findings, advice: Hints | None, notes: Sequence[str], *, gaps: bool
) -> dict[str, Any]:
    """Return everything as plain values: seconds, shares and counts; times are monotonic seconds of the record. `gaps`
    adds every gap of every worker."""
    start_s, end_s, steps = found.window
    return {
        "run": run.name,
        "graph": run.plan.name,
        "state": run.state,
        "diverged": _diverged(run),
        "report": summary(found.report),
        "window": {"start_s": start_s, "end_s": end_s, "steps": steps},
        "paths": found.paths,
        "slack": {"stages": found.slack.stages(), "steps": found.slack.steps, "tasks": found.slack.tasks},
        "idle": {"groups": found.groups, "workers": found.workers} | ({"gaps": found.gaps} if gaps else {}),
        "episodes": found.episodes,
        "hints": advice,
        "notes": [*notes, *(advice.notes if advice else ())],
    }


def _print(run: OpenedRun, found: Findings, advice: Hints | None, notes: Sequence[str], step: int | None) -> None:
    out = console.console()
    out.print(f"{run.name}: {run.state}, {_done(run)} of {run.plan.steps} steps", markup=False)
    for problem in _diverged(run):
        out.print(problem, markup=False)
    steps = found.report.steps
    out.print(found.report.critical_path.sentence, markup=False)
    if steps.seconds:
        text = f"{steps.mean:.3f} s per step on average, median {steps.median:.3f} s, over {len(steps.seconds)} steps"
        out.print(f"{text} after the first {len(steps.warm_up)}: {steps.averaged}", markup=False)
    by_stage, by_part = found.report.critical_path.by_stage, found.report.critical_path.by_part
    if step is not None:
        path = found.paths[0]
        by_stage, by_part = path.seconds("stage"), mean_parts([path])
        out.print(f"step {step}: {path.end_s - path.start_s:.3f} s", markup=False)
    if by_stage:
        out.print()
        out.print(_stages(by_stage, by_part, found.slack.stages()))
    if found.window[2]:
        out.print()
        out.print(_idle(found.groups))
    for episodes in found.episodes:
        out.print(_spent(episodes), markup=False)
    if advice and advice.hints:
        out.print()
        for hint in advice.hints:
            out.print(f"{hint.times:.2f} x  {hint.text}   {hint.command}", markup=False)
        real, same = advice.steps
        seconds = f"simulated as it was {advice.simulated_s:.3f} s per step ({same})"
        out.print(f"{seconds}, measured {advice.measured_s:.3f} s ({real}): {advice.base}", markup=False)
    for note in (*notes, *(advice.notes if advice else ())):
        out.print(f"note: {note}", markup=False)


def _done(run: OpenedRun) -> int:
    """Return how many steps have ended, by the metrics or, without them, by the record."""
    ended = (event.step + 1 for event in run.events if isinstance(event, trace.StepEnded))
    return max(max((int(line["step"]) for line in run.metrics), default=0), max(ended, default=0))


def _diverged(run: OpenedRun) -> list[str]:
    return [event.problem for event in run.events if isinstance(event, trace.Diverged)]


def _stages(by_stage: dict[str, float], by_part: dict[str, dict[str, float]], spare: dict[str, float | None]) -> Table:
    """Return a table of the stages on the critical path, with their parts, and off it. The time to spare is the
    smallest of all steps."""
    table = _table("stage", "on the path", "of the step", "to spare")
    total_s = sum(by_stage.values())
    for stage in dict.fromkeys((*by_stage, *spare)):
        seconds = by_stage.get(stage)
        on = ("-", "-") if seconds is None else (f"{seconds:.3f} s", f"{100 * seconds / total_s:.0f} %")
        left = spare.get(stage)
        table.add_row(stage, *on, "" if stage not in spare else "no version waits" if left is None else f"{left:.3f} s")
        for part, seconds in by_part.get(stage, {}).items():
            if part and seconds >= WORTH * total_s:
                table.add_row(f"  {part}", f"{seconds:.3f} s", f"{100 * seconds / total_s:.0f} %", "")
    return table


def _spent(found: EpisodeTimes) -> str:
    """Return how episodes spent their time, in words."""
    total_s = sum(found.parts.values()) or 1.0
    shares = {name: s / total_s for name, s in found.parts.items() if s >= WORTH * total_s}
    parts = ", ".join(f"{100 * share:.0f} % {name}" for name, share in shares.items())
    text = f"{found.stage}: an episode takes {found.seconds:.3f} s: {parts}"
    if found.waiting is None:
        return text
    return f"{text}; for {100 * found.waiting:.0f} % of the time, all wait for environments"


def _idle(groups: Iterable[Idle]) -> Table:
    """Return a table of each worker group's share of time without a task, and what it waited for."""
    table = _table("worker group", "idle", "waiting for")
    for group in groups:
        parts = [part for part in group.parts if part.seconds >= WORTH * group.wall_s][:SHOWN]
        message = [
            f"{100 * part.seconds / group.wall_s:.0f} % {part.field or part.stage or part.cause}"
            + (f" ({part.stage})" if part.field else f" ({part.cause})" if part.stage else "")
            for part in parts
        ]
        share = group.idle_s / group.wall_s if group.wall_s else 0.0
        table.add_row(group.group, f"{100 * share:.0f} %", ", ".join(message) or "-")
    return table


def _print_comparison(found: Comparison) -> None:
    out = console.console()
    table = _table("seconds per step", found.first, found.second, "difference")
    rows = {"step": found.step_s, "step, median": found.step_median_s}
    rows |= found.stages | {f"on the path: {stage}": pair for stage, pair in found.path.items()}
    for name, pair in rows.items():
        table.add_row(name, *_cells(pair))
    out.print(table)
    for run, sentence in zip((found.first, found.second), found.sentences):
        out.print(f"{run}: {sentence}", markup=False)
    shared = {name: last for name, pairs in found.metrics.items() if (last := _last(pairs.values()))}
    if shared:
        out.print()
        table = _table("last step of both", found.first, found.second, "difference")
        for name, pair in shared.items():
            table.add_row(name, *_cells(pair))
        out.print(table)
    out.print()
    for change in found.changes:
        what = " ".join(part for part in (change.kind, change.name, change.what) if part)
        out.print(f"{what}: {_shown(change.before)} -> {_shown(change.after)}", markup=False)
    if not found.changes:
        out.print("graph, settings and flags are the same")


def _last(pairs: Iterable[Pair]) -> Pair | None:
    """Return the last step that both runs have."""
    both = [pair for pair in pairs if pair.difference is not None]
    return both[-1] if both else None


def _cells(pair: Pair) -> list[str]:
    shown = ["-" if value is None else f"{value:.4g}" for value in (pair.first, pair.second)]
    return [*shown, "-" if pair.difference is None else f"{pair.difference:+.4g}"]


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={part}" for name, part in value.items() if part not in (None, [], ()))
    return "absent" if value is None else str(value)


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None, padding=(0, 2, 0, 0))


if __name__ == "__main__":
    sys.exit(main())
