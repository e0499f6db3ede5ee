"""Prints a run's problems, plan, progress line and final table.

Colors appear only on a terminal, and never if NO_COLOR is set.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pipeline import screen
from pipeline.cli.one_row import fitted
from pipeline.cli.start_line import StartLine
from pipeline.cli.time_left import TimeLeft
from pipeline.errors import Problem
from pipeline.plan.plan import PlacedGroup, Plan, PlannedStage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_started_in: list[Path] = []  # by the commands that run, one in another


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or 100 columns wide without a terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 100, highlight=False, soft_wrap=True)


@contextmanager
def started_here() -> Iterator[None]:
    """Within the context, a command runs that was started in the working directory of now."""
    _started_in.append(Path.cwd())
    try:
        yield
    finally:
        _started_in.pop()


def print_problems(problems: Iterable[Problem]) -> None:
    """Print one line per problem to stderr. Paths below the folder in which the command was started are shown relative
    to it, even if user code has left it."""
    here = f"{_started_in[-1] if _started_in else Path.cwd()}/"
    for problem in problems:
        text = " ".join(str(problem).splitlines())
        print(text.replace(here, "") if len(here) > 2 else text, file=sys.stderr)


def print_plan(plan: Plan) -> None:
    """Print the graph from top to bottom, the placement, the fields, and their partitions."""
    from rich.table import Table

    out = console()
    out.print(f"[bold]{plan.name}[/]  {plan.steps} steps of {plan.batch} prompts x {plan.group_size} samples")
    out.print()
    for line in drawing(plan):
        out.print(line, markup=False)
    out.print()
    placement = Table("worker group", "backend", "actors", "GPUs", "stages", box=None, padding=(0, 2, 0, 0))
    for group in plan.placed:
        doing = " ".join(group.stages) or f"serves {' '.join(group.serves)}"
        placement.add_row(group.name, group.backend, _actors(group), str(group.gpus), doing)
    out.print(placement)
    out.print("An actor is one process; the stages of a worker group share its actors. The view shows their nodes.")
    for group in (group for group in plan.placed if group.python):
        out.print(f"The actors of {group.name} run with {group.python}", markup=False)
    if sharing := [stage.name for stage in plan.stages if stage.sharding and stage.sharding.shares]:
        out.print(
            f"A packed row computes the prompt of a group once, where that pays: {', '.join(sharing)}", markup=False
        )
    out.print()
    edges = Table("field", "from", "bytes per step", "read by", "partition", box=None, padding=(0, 2, 0, 0))
    home = {field: made.name.partition(".")[2] for made in plan.partitions for field in made.fields}
    for life in plan.lifetimes:
        edge = next((edge for edge in plan.edges if edge.field == life.field), None)
        readers = " ".join(life.readers) or "nobody"
        edges.add_row(life.field, life.writer, _volume(plan, edge), readers, home.get(life.field, "-"))
    out.print(edges)
    out.print()
    out.print(_partitions(plan))
    out.print(_peak(plan), markup=False)
    if plan.fences:
        out.print()
        for fence in plan.fences:
            when = "of the previous step" if fence.lag else "of the same step"
            out.print(f"{fence.after} waits for {fence.before} {when}: {fence.why}", markup=False)


def drawing(plan: Plan) -> list[str]:
    """Return the stages by layer as lines of text, each with its inputs and their writers."""
    writer = {life.field: life.writer for life in plan.lifetimes}
    lines = []
    for depth, layer in enumerate(plan.layers):
        if depth:
            lines.append("        |")
            lines.append("        v")
        lines += [_box(stage, writer) for stage in layer]
    back = [edge for edge in plan.edges if edge.back]
    return lines + [f"        ^ {edge.field}: {edge.writer} -> {edge.reader} of a later step" for edge in back]


def _box(stage: PlannedStage, writer: dict[str, str]) -> str:
    where = " -> ".join(stage.groups) or "outside"
    by_writer: dict[str, list[str]] = {}
    for field in (*stage.reads, *stage.awaits):
        by_writer.setdefault(writer[field], []).append(field)
    sources = "  ".join(f"{name}({', '.join(fields)})" for name, fields in by_writer.items())
    return f"[ {stage.name} ] on {where}" + (f"  <-  {sources}" if sources else "")


def _actors(group: PlacedGroup) -> str:
    last = group.workers - 1
    return f"{group.name}.0" + (f" to {group.name}.{last}" if last > 1 else f" {group.name}.1" if last else "")


def _partitions(plan: Plan) -> Table:
    """Return the partitions with the most bytes of a group, as far as the plan knows them."""
    from rich.table import Table

    table = Table("partition", "cleared after", "most bytes per group", box=None, padding=(0, 2, 0, 0))
    for made in plan.partitions:
        parts = [_bytes(made.most_bytes)] if made.most_bytes else []
        after = " and ".join(made.last_readers) if made.holders else "every stage"
        table.add_row(made.name, after, " + ".join([*parts, *made.unknown]))
    return table


def _peak(plan: Plan) -> str:
    """Say how many bytes the data plane holds at most."""
    per_group, limit = sum(partition.most_bytes for partition in plan.partitions), plan.capacity_bytes
    fit = max(plan.batch, limit // per_group) if limit and per_group else plan.capacity
    groups = min(plan.capacity, fit)
    unknown = [field for partition in plan.partitions for field in partition.unknown]
    more = f", and {', '.join(unknown)}" if unknown else ""
    said = f"; capacity_bytes is {_bytes(limit)}" if limit else ""
    return f"At most {groups} groups are in flight: {_bytes(groups * per_group)}{more}{said}."


def _bytes(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _volume(plan: Plan, edge: object | None) -> str:
    from pipeline.plan.plan import Edge

    if not isinstance(edge, Edge) or not edge.bytes_per_sample:
        return "-"
    samples = plan.batch * plan.group_size
    if edge.ragged:
        return f"{samples} x {edge.bytes_per_sample} B x {edge.ragged}"
    return _bytes(samples * edge.bytes_per_sample)


_COUNTS = ("eval/count", "eval/length_mean", "eval/truncated", "eval/end_")  # metrics of no reward begin with one
_GONE_FIRST = ("slowest", "speed", "age", "pace", "measure", "left", "reward")  # from a line that is too long
_FAILED = "/end_failed"  # of a stage: the fraction of its episodes whose environment failed


class Progress:
    """A progress line: rewritten in place on a terminal, in one row of it, and one plain line per step elsewhere.
    `metrics` is the record of the steps before `start`."""

    def __init__(self, plan: Plan, start: int, *, plain: bool = False, metrics: Path | None = None) -> None:
        self._plan = plan
        self._live = sys.stdout.isatty() and not plain
        self._start_line = StartLine(live=self._live)
        self._left = TimeLeft(plan, start)
        self._ended_s = time.monotonic()  # the last step, or what came before the first
        self._done = start
        self.evaluations: list[tuple[int, float]] = []
        self.measure = ""  # the metric that is shown: the first reward of the evaluation
        self.last: dict[str, float] = {}
        self.dropped: Counter[str] = Counter()  # groups, by reason
        self._failures_said = False
        self._recall(metrics)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._start_line.over()

    def starting(self, what: str) -> None:
        """Show what the start of the run waits for, until the first step."""
        self._ended_s = time.monotonic()
        self._start_line.says(what)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record that a step finished; -1 is the evaluation before the first step."""
        self._start_line.over()
        took_s, self._ended_s = time.monotonic() - self._ended_s, time.monotonic()
        evaluated = self._evaluated(step + 1, metrics)
        if step < 0:
            self._left.before(metrics)
            if self.evaluations:
                self._print({"": f"before training  {self.measure} {self.evaluations[-1][1]:.3f}"}, keep=True)
            return
        self.last = metrics
        self._warn_of_failures(step, metrics)
        for name, groups in metrics.items():
            if name.startswith("dropped/"):
                self.dropped[name.removeprefix("dropped/")] += int(groups)
        self._done = step + 1
        self._left.took(step, took_s)
        self._print(self._parts(metrics), keep=evaluated or self._done == self._plan.steps)

    def _recall(self, metrics: Path | None) -> None:
        """Take up the evaluations of a run that goes on."""
        from pipeline.record.runs import read_metrics

        for line in read_metrics(metrics) if metrics else ():
            self._evaluated(line["step"], {name: value for name, value in line.items() if type(value) in (int, float)})

    def _evaluated(self, done: int, metrics: Mapping[str, float]) -> bool:
        """Take up the evaluation of a step. Returns whether there was one."""
        name = next((name for name in metrics if name.startswith("eval/") and not name.startswith(_COUNTS)), "")
        measure = name.removeprefix("eval/").replace("_", " ")
        if measure and measure != self.measure:  # what was measured before cannot be compared
            self.measure, self.evaluations = measure, []
        self.evaluations += [(done, metrics[name])] if measure else []
        return bool(measure)

    def _warn_of_failures(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say once that environments fail: half of a step's episodes are no accident."""
        stage = next(
            (name.partition("/")[0] for name, part in metrics.items() if name.endswith(_FAILED) and part >= 0.5), ""
        )
        if stage and not self._failures_said:
            self._failures_said = True
            what = f"{metrics[stage + _FAILED]:.0%} of the episodes of {stage!r} ended since their environment failed"
            why = "one that fails twice at the same turn is taken for the policy's doing: end is failed:<turn>:<kind>"
            fix = "read what failed in logs/ of the run, and play the environment by hand"
            self.warn(Problem(where=f"step {step + 1}", what=what, why=why, fix=fix, warning=True))

    def warn(self, problem: Problem) -> None:
        """Print a warning below the progress line."""
        self._leave_line()
        print_problems([problem])

    def end(self) -> None:
        """Keep the last progress line and move below it."""
        self._start_line.over()
        self._leave_line()

    def _leave_line(self) -> None:
        if self._live:
            print()

    def _parts(self, metrics: dict[str, float]) -> dict[str, str]:
        """Return the parts of the line, each with what separates it from the one before."""
        step_s = metrics.get("time/step_s", 0.0)
        parts = {"step": f"step {self._done}/{self._plan.steps}"}
        if "reward/mean" in metrics:
            parts["reward"] = f"  reward {metrics['reward/mean']:.3f}"
        if self.evaluations:
            parts["measure"] = f"  {self.measure} {self.evaluations[-1][1]:.3f}"
        if "rollout/length_mean" in metrics and step_s:
            tokens = metrics["rollout/length_mean"] * self._plan.batch * self._plan.group_size
            parts["speed"] = f"  {tokens / step_s:,.0f} tok/s"
        age = next((value for name, value in metrics.items() if name.endswith("/staleness_mean")), None)
        if age is not None and self._plan.max_staleness:
            parts["age"] = f"  {age:.1f} versions old"
        stages = {
            name[5:-2]: value for name, value in metrics.items() if name.startswith("time/") and name != "time/step_s"
        }
        if stages:
            slowest = max(stages, key=lambda name: stages[name])
            parts["pace"] = f"  {step_s:.2f} s/step"
            parts["slowest"] = f", slowest {slowest} {stages[slowest]:.2f} s"
        return parts | {"left": f"  {self._left.seconds():.0f} s left"}

    def _print(self, parts: Mapping[str, str], *, keep: bool) -> None:
        """Print a line. One that is kept is whole, since nothing is written over it."""
        whole = "".join(parts.values())
        if self._live:
            text = whole if keep else fitted(parts, _GONE_FIRST, screen.columns() - 1)
            print(f"\r\x1b[2K{text}", end="\n" if keep else "", flush=True)
        elif keep or self._done % 10 == 0 or self._plan.steps <= 20:
            print(whole, flush=True)


def print_summary(
    plan: Plan, progress: Progress, *, run_dir: str, wall_s: float, commands: Sequence[tuple[str, str]]
) -> None:
    """Print the final table: results, locations, next commands."""
    rows: list[tuple[str, str]] = []
    if progress.evaluations:
        (first, before), (last, after) = progress.evaluations[0], progress.evaluations[-1]
        name = f"{progress.measure} on held-out prompts"
        compared = f", {after:.3f} at step {last} ({after - before:+.3f})" if last != first else ""
        rows.append((name, f"{before:.3f} at step {first}{compared}"))
    if "reward/mean" in progress.last:
        rows.append(("reward of the last step", f"{progress.last['reward/mean']:.3f}"))
    if plan.drops_stale:
        lost = ", ".join(f"{count} {reason}" for reason, count in sorted(progress.dropped.items()))
        rows.append(("groups dropped for their age", lost))
    rows.append(("steps", f"{plan.steps}, last one {progress.last.get('time/step_s', 0.0):.3f} s"))
    rows.append(("wall time", f"{wall_s:.1f} s, start-up included"))
    rows.append(("run directory", run_dir))
    rows.extend(commands)
    width = max(len(label) for label, _ in rows)
    for label, value in rows:  # never wrapped, so that commands can be copied
        print(f"{label:<{width}}  {value}")
