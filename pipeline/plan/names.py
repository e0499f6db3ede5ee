"""Names that the engine reserves: the user's stages, fields and worker groups must not have them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.declare.abilities import server_of
from pipeline.declare.fields import Field
from pipeline.declare.graph import Graph
from pipeline.declare.group import HOST, WorkerGroup
from pipeline.declare.stage import Stage
from pipeline.errors import Problem, shown

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
LONGEST = 64  # characters of a name
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
                what=f"stage name {shown(stage.name)} is not usable as a file name",
                why="it is part of the names of its metrics and of its failure folders",
                fix="use letters, digits, '-' and '_', at most 64",
            )
        for field in written(stage):
            if field.name in FIELDS:
                what = f"stage {stage.name!r} writes a field named {field.name!r}"
                yield Problem(where=where, what=what, why=FIELDS[field.name], fix="choose another name")
    groups = [group for stage in stages for group in _all_groups(stage) if isinstance(group, WorkerGroup)]
    for group in {id(group): group for group in groups}.values():
        if group.name == HOST != graph.host.name:
            yield Problem(
                where=str(group.location),
                what=f"a worker group is named {HOST!r}, but the graph's host is {graph.host.name!r}",
                why="the group of that name runs on the driver's machine, for stages that name no group",
                fix="choose another name, or give it to Graph(..., host=...)",
            )


def written(stage: Stage) -> list[Field]:
    """Return the fields that a stage writes; none if `writes` is no sequence or raises: other checks report that."""
    try:
        fields = stage.writes
    except (Exception, SystemExit):  # noqa: BLE001 - a property of the user's
        return []
    return [field for field in fields if isinstance(field, Field)] if isinstance(fields, Sequence) else []


def too_long(graph: Graph, stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yield a problem for each name of a stage or worker group that is too long to show it in other problems."""
    groups = [group for stage in stages for group in _all_groups(stage)]
    known: dict[int, object] = {id(one): one for one in (*stages, graph.host, *groups)}
    for one in known.values():
        if isinstance(one, Stage | WorkerGroup) and isinstance(one.name, str) and len(one.name) > LONGEST:
            yield Problem(
                where=str(one.location),
                what=f"{'stage' if isinstance(one, Stage) else 'worker group'} name {shown(one.name)} "
                f"has {len(one.name)} characters",
                why="it is part of the names of files",
                fix=f"use letters, digits, '-' and '_', at most {LONGEST}",
            )


def _all_groups(stage: Stage) -> list[WorkerGroup]:
    """Return the groups that a stage names: it runs on them, or one serves it."""
    server = server_of(stage)
    return [*stage.groups(), *([server] if server else [])]


def is_name(value: object) -> bool:
    """Return whether a value can be part of a file name: letters, digits, '-' and '_', at most 64."""
    if not isinstance(value, str) or len(value) > LONGEST or not value.isascii():
        return False
    return value.replace("-", "").replace("_", "").isalnum()


def group_name_problem(group: WorkerGroup) -> Iterator[Problem]:
    """Yield a problem if a worker group's name cannot be part of a file name."""
    if not is_name(group.name):
        yield Problem(
            where=str(group.location),
            what=f"worker group name {shown(group.name)} is not usable as a file name",
            why="it names the logs of its workers",
            fix="use letters, digits, '-' and '_', at most 64",
        )
