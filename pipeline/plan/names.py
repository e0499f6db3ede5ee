"""Names that the engine reserves: the user's stages, fields and worker groups must not have them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.declare.fields import Field
from pipeline.declare.graph import Graph
from pipeline.declare.group import HOST, WorkerGroup
from pipeline.declare.stage import Stage
from pipeline.errors import Problem

METRICS: Mapping[str, str] = {  # prefixes of metrics that are not a stage's name
    "eval": "the metrics eval/... are those of Evaluate",
    "time": "the metrics time/... are the seconds of every stage",
    "data": "the metrics data/... are those of the data plane",
    "stored": "the metrics stored/... are the bytes in the data plane",
    "dropped": "the metrics dropped/... count groups that were too old or cancelled",
}
STAGES: Mapping[str, str] = {
    **METRICS,
    "samples": "every plan adds a stage of that name, which writes texts to the run directory",
    "step": "the metric time/step_s is the time of the whole step, time/STAGE_s that of a stage",
    "version": "the record uses that name for tasks that wait for a policy version",
    "checkpoint": "the record uses that name for tasks that wait for a checkpoint",
}
FIELDS: Mapping[str, str] = dict.fromkeys(
    ("step", "key", "version"), "each line of samples/ has the step, key and version of its sample under these names"
)


def reserved(graph: Graph, stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yield a problem for each reserved name, and for each stage whose name cannot be part of a file name."""
    for stage in stages:
        where = str(stage.location)
        if stage.name in STAGES:
            what, why, fix = f"a stage is named {stage.name!r}", STAGES[stage.name], "choose another name"
            yield Problem(where=where, what=what, why=why, fix=fix)
        elif not is_name(stage.name):
            yield Problem(
                where=where,
                what=f"stage name {stage.name!r} is not usable as a file name",
                why="it is part of the names of its metrics and of its failure folders",
                fix="use letters, digits, '-' and '_', at most 64",
            )
        for field in stage.writes if isinstance(stage.writes, Sequence) else ():  # later checks report other types
            if isinstance(field, Field) and field.name in FIELDS:
                what = f"stage {stage.name!r} writes a field named {field.name!r}"
                yield Problem(where=where, what=what, why=FIELDS[field.name], fix="choose another name")
    groups = [group for stage in stages for group in stage.groups() if isinstance(group, WorkerGroup)]
    for group in {id(group): group for group in groups}.values():
        if group.name == HOST != graph.host.name:
            yield Problem(
                where=str(group.location),
                what=f"a worker group is named {HOST!r}, but the graph's host is {graph.host.name!r}",
                why="the group of that name runs on the driver's machine, for stages that name no group",
                fix="choose another name, or give it to Graph(..., host=...)",
            )


def is_name(value: object) -> bool:
    """Return whether a value can be part of a file name: letters, digits, '-' and '_', at most 64."""
    if not isinstance(value, str) or len(value) > 64 or not value.isascii():
        return False
    return value.replace("-", "").replace("_", "").isalnum()


def group_name_problem(group: WorkerGroup) -> Iterator[Problem]:
    """Yield a problem if a worker group's name cannot be part of a file name."""
    if not is_name(group.name):
        yield Problem(
            where=str(group.location),
            what=f"worker group name {group.name!r} is not usable as a file name",
            why="it names the logs of its workers",
            fix="use letters, digits, '-' and '_', at most 64",
        )
