"""Names that the engine uses itself: what a stage, a field or a worker group of the user's must not be called. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.declare.fields import Field
from pipeline.declare.graph import Graph
from pipeline.declare.group import HOST, WorkerGroup
from pipeline.declare.stage import Stage
from pipeline.errors import Problem

STAGES: Mapping[str, str] = {
    "samples": "every plan adds a stage of that name, which keeps texts in the run directory",
    "step": "the metric time/step_s is the time of the whole step, time/STAGE_s that of a stage",
    "time": "the metrics time/... are the seconds of every stage",
    "dropped": "the metrics dropped/... count groups that were too old or cancelled",
    "version": "a record says by that name that a task waits for a policy version",
    "checkpoint": "a record says by that name that a task waits for a checkpoint",
}
FIELDS: Mapping[str, str] = dict.fromkeys(
    ("step", "key", "version"), "a line of samples/ has the step, the key and the version of a sample by these names"
)


def reserved(graph: Graph, stages: Sequence[Stage]) -> Iterator[Problem]:
    """Stages, fields and worker groups with such a name, and stages whose name cannot be part of a file name."""
    for stage in stages:
        where = str(stage.location)
        if stage.name in STAGES:
            what, why, fix = f"a stage is named {stage.name!r}", STAGES[stage.name], "choose another name"
            yield Problem(where=where, what=what, why=why, fix=fix)
        elif not is_name(stage.name):
            yield Problem(
                where=where,
                what=f"stage name {stage.name!r} is not usable as a file name",
                why="it names its metrics, and the folder of what it fails on",
                fix="use letters, digits, '-' and '_'",
            )
        for field in stage.writes:
            if isinstance(field, Field) and field.name in FIELDS:
                what = f"stage {stage.name!r} writes a field named {field.name!r}"
                yield Problem(where=where, what=what, why=FIELDS[field.name], fix="choose another name")
    groups = [group for stage in stages for group in stage.groups() if isinstance(group, WorkerGroup)]
    for group in {id(group): group for group in groups}.values():
        if group.name == HOST != graph.host.name:
            yield Problem(
                where=str(group.location),
                what=f"a worker group is named {HOST!r}, beside the graph's host {graph.host.name!r}",
                why="the group of that name stays on the driver's machine, for stages that name no group",
                fix="choose another name, or give it to Graph(..., host=...)",
            )


def is_name(value: object) -> bool:
    """Whether it can be part of the name of a file."""
    return isinstance(value, str) and value.isascii() and value.replace("-", "").replace("_", "").isalnum()


def group_name_problem(group: WorkerGroup) -> Iterator[Problem]:
    """A worker group whose name cannot be part of a file name."""
    if not is_name(group.name):
        yield Problem(
            where=str(group.location),
            what=f"worker group name {group.name!r} is not usable as a file name",
            why="it names the logs of its workers",
            fix="use letters, digits, '-' and '_'",
        )
