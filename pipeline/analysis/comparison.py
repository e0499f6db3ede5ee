"""Compares two runs: seconds, metrics by step, and differences in graph, settings and flags. Pure.

found = compare(open_run(Path("runs/a")), open_run(Path("runs/b")))
found.stages["train"]          # Pair(first=1.2, second=0.8)
found.changes[0]               # Change(kind="setting", name="max_staleness", what="", before=0, after=1)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pipeline.analysis.report import Report, report, stage_seconds
from pipeline.plan.plan import Plan
from pipeline.record.history import Tasks, step_ends
from pipeline.record.runs import Metrics, OpenedRun

NOT_COMPARED = {"stage": {"name", "where", "layer", "path"}, "worker group": {"name", "stages"}}
SETTINGS = (
    "name", "source", "batch", "group_size", "steps", "max_staleness", "ahead", "on_stale", "refit", "capacity",
    "checkpoint_every", "gate",
)  # fmt: skip
ABSENT = None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One number for both runs; None if a run lacks it."""

    first: float | None
    second: float | None

    @property
    def difference(self) -> float | None:
        """Second minus first; None if either is None."""
        return None if self.first is None or self.second is None else self.second - self.first


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A stage, edge, fence, worker group, setting or flag (`kind`) that only one run has, or whose attribute `what`
    differs. The run that lacks it has None."""

    kind: str
    name: str
    what: str
    before: Any
    after: Any


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs.

    step_s     mean seconds per step after warm-up; `step_median_s` is the median
    stages     seconds per step in which a stage had a task, by stage
    path       seconds per step on the critical path, by stage
    metrics    by name: every step, from 1, that has it in either run, with both values
    changes    differences in plan and flags
    sentences  what bounds each run
    """

    first: str
    second: str
    step_s: Pair
    step_median_s: Pair
    stages: dict[str, Pair]
    path: dict[str, Pair]
    metrics: dict[str, dict[int, Pair]]
    changes: tuple[Change, ...]
    sentences: tuple[str, str]


def compare(first: OpenedRun, second: OpenedRun) -> Comparison:
    """Compare two runs."""
    tasks = [Tasks(run.events) for run in (first, second)]
    reports = [report(run.plan, found) for run, found in zip((first, second), tasks)]
    return Comparison(
        first=first.name,
        second=second.name,
        step_s=Pair(first=_known(reports[0].steps.mean), second=_known(reports[1].steps.mean)),
        step_median_s=Pair(first=_known(reports[0].steps.median), second=_known(reports[1].steps.median)),
        stages=_pairs(*(_stages(found, made) for found, made in zip(tasks, reports))),
        path=_pairs(*(made.critical_path.by_stage for made in reports)),
        metrics=compare_metrics(first.metrics, second.metrics),
        changes=tuple(changes(first, second)),
        sentences=(reports[0].critical_path.sentence, reports[1].critical_path.sentence),
    )


def compare_metrics(first: Sequence[Metrics], second: Sequence[Metrics]) -> dict[str, dict[int, Pair]]:
    """Return the values by metric and step. If a step is repeated, its last line counts."""
    sides = [{int(line["step"]): line for line in lines if "step" in line} for lines in (first, second)]
    names = dict.fromkeys(name for side in sides for line in side.values() for name in line if name != "step")
    steps = sorted({*sides[0], *sides[1]})
    found = {}
    for name in names:
        values = {step: [_number(side.get(step, {}).get(name)) for side in sides] for step in steps}
        found[name] = {step: Pair(first=a, second=b) for step, (a, b) in values.items() if (a, b) != (None, None)}
    return found


def changes(first: OpenedRun, second: OpenedRun) -> list[Change]:
    """Return the differences between the two plans, and between the runs' flags."""
    parts = [(_parts(run.plan), _flags(run)) for run in (first, second)]
    (before, flags), (after, other_flags) = parts
    found: list[Change] = []
    for kind in before:
        found += _changed(kind, before[kind], after[kind])
    return [*found, *_changed("flag", flags, other_flags)]


def _parts(plan: Plan) -> dict[str, dict[str, dict[str, Any]]]:
    """Return a plan by kind, name and attribute. Single values have the attribute ""."""
    built = msgspec.to_builtins(plan)
    return {
        "setting": {name: {"": built[name]} for name in SETTINGS},
        "stage": {stage["name"]: _without("stage", stage) for stage in built["stages"]},
        "worker group": {group["name"]: _without("worker group", group) for group in built["groups"]},
        "edge": {
            f"{edge['writer']} -> {edge['reader']}: {edge['field']}": {
                key: edge[key] for key in ("bytes_per_sample", "ragged", "back")
            }
            for edge in built["edges"]
        },
        "fence": {f"{fence['before']} -> {fence['after']}": {"lag": fence["lag"]} for fence in built["fences"]},
    }


def _without(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in NOT_COMPARED[kind]}


def _flags(run: OpenedRun) -> dict[str, dict[str, Any]]:
    arguments = run.described.get("args")
    return {name: {"": value} for name, value in arguments.items()} if isinstance(arguments, dict) else {}


def _changed(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterable[Change]:
    for name in dict.fromkeys((*before, *after)):
        if name not in before or name not in after:
            sides = [_whole(side.get(name)) for side in (before, after)]
            yield Change(kind=kind, name=name, what="", before=sides[0], after=sides[1])
            continue
        for what in dict.fromkeys((*before[name], *after[name])):
            one, other = before[name].get(what), after[name].get(what)
            if one != other:
                yield Change(kind=kind, name=name, what=what, before=one, after=other)


def _whole(values: Mapping[str, Any] | None) -> Any:
    """Return the value or attributes of a part that only one run has; ABSENT if `values` is None."""
    return values.get("", values) if values is not None else ABSENT


def _stages(tasks: Tasks, made: Report) -> dict[str, float]:
    ends = [at_s for at_s, _ in step_ends(tasks)]
    count = len(made.steps.seconds)
    return stage_seconds(tasks, ends[-1 - count], ends[-1], count) if count else {}


def _pairs(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, Pair]:
    names = dict.fromkeys((*first, *second))
    return {name: Pair(first=first.get(name), second=second.get(name)) for name in names}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _known(value: float) -> float | None:
    return value or None
