"""Checks of the types and names in a graph. They run first; the other checks rely on them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.declare.fields import Field
from pipeline.declare.graph import Graph, Schedule
from pipeline.declare.group import Model, WorkerGroup
from pipeline.declare.sharding import Sharding
from pipeline.declare.stage import Gate, Stage, setup_problems
from pipeline.declare.task import SHAPES
from pipeline.errors import CALLED, Problem, is_users, message_of, shown
from pipeline.plan.names import is_name, reserved, too_long, written


def structure(graph: Graph) -> Iterator[Problem]:
    """Yield the problems of types and names, on which the other checks rely."""
    for what, why, fix in _objections(graph):
        yield Problem(where=str(graph.location), what=what, why=why, fix=fix)
    if not isinstance(graph.stages, Sequence):
        return
    stages = [stage for stage in (graph.source, *graph.stages) if isinstance(stage, Stage)]
    unreadable = [problem for stage in stages if (problem := _unreadable(stage))]
    if unreadable:
        yield from unreadable
        return
    if long := list(too_long(graph, stages)):
        yield from long
        return
    yield from _names_and_types(stages)
    yield from reserved(graph, stages)


def _objections(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """Yield what has the wrong type in a graph, why it is wrong, and a fix."""
    if not is_name(graph.name):
        why = "it names run directories and the data plane partition"
        yield (
            f"graph name {shown(graph.name)} is not usable as a folder name",
            why,
            "use letters, digits, '-' and '_', at most 64",
        )
    if not isinstance(graph.host, WorkerGroup):
        why, fix = "stages that name no worker group run on it", "host=WorkerGroup('host')"
        yield f"host is {shown(graph.host)}", why, fix
    if not isinstance(graph.schedule, Schedule):
        yield f"schedule is {shown(graph.schedule)}", "a graph has a Schedule", "schedule=Schedule(steps=100)"
    if not isinstance(graph.stages, Sequence):
        what = "stages is " + ("one stage" if isinstance(graph.stages, Stage) else shown(graph.stages))
        yield what, "a graph has a tuple of stages", "stages=(Rollout(...), ...)"
        return
    for at, stage in (("source", graph.source), *((f"stages[{i}]", stage) for i, stage in enumerate(graph.stages))):
        if not isinstance(stage, Stage):
            is_class = isinstance(stage, type)
            fix = f"pass {stage.__name__}(...)" if is_class else "pass a Stage, such as Reward(...)"
            yield f"{at} is {shown(stage)}", "sources and stages are Stage objects", fix


def _unreadable(stage: Stage) -> Problem | None:
    """Return a problem if an attribute of a stage raises, or is a method where a value belongs."""
    for name in ("name", "shape", "groups", "uses", "updates", "sharding", "reads", "writes", "reads_back"):
        try:
            value = stage.groups() if name == "groups" else getattr(stage, name)
            wrong = ("a method" if callable(value) else shown(value)) if _is_odd(name, value) else ""
        except CALLED as error:
            if not is_users(error):
                raise
            wrong = "" if name in _CHECKED else message_of(error)
        if wrong:
            return Problem(
                where=str(stage.location),
                what=f"{type(stage).__name__}.{name} is {wrong}",
                why="a stage is described by its attributes and properties",
                fix=_LIKE[name],
            )
    return None


def _is_odd(name: str, value: Any) -> bool:
    if name in ("uses", "groups"):
        return callable(value) or not isinstance(value, Sequence)
    return callable(value) or (name == "sharding" and not isinstance(value, Sharding | None))


_SHAPE = "shape = 'map', or leave it out"
_CHECKED = ("sharding", "reads", "writes", "reads_back")  # errors of these are reported by the checks that follow
_LIKE = {
    "name": "name = 'mine'",
    "shape": _SHAPE,
    "groups": "leave out groups(), and give the stage on=",
    "uses": "uses = (policy,), or a property",
    "updates": "updates = None, or a property",
    "sharding": "sharding = Sharding.of(Packed(tokens=8192)), from pipeline.declare.sharding",
    **{
        kind: f"{kind}=(REWARD,), from stages.vocabulary, or (Field('name', dtype=...),)"
        for kind in ("reads", "writes")
    },
    "reads_back": "reads_back=(SERVED_WEIGHTS,), from stages.vocabulary",
}


def _names_and_types(stages: Sequence[Stage]) -> Iterator[Problem]:
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            same = [stage for stage in stages if stage.name == name]
            writers = Counter(field.name for stage in same for field in written(stage))
            shared = [repr(field) for field, times in writers.items() if times > 1]
            named = all("name" in inspect.signature(type(stage)).parameters for stage in same[1:])
            yield Problem(
                where=" and ".join(dict.fromkeys(str(stage.location) for stage in same)),
                what=f"{count} stages are named {name!r}" + (f" and write {', '.join(shared)}" if shared else ""),
                why="stage names must be unique" + (", and a field has one writer" if shared else ""),
                fix=f"give one of them name={name + '_2'!r}"
                if named and not shared
                else one_for_all(same) or "remove one of them",
            )
    for stage in stages:
        yield from _parts(stage)


def one_for_all(stages: Sequence[Stage]) -> str | None:
    """Return the fix if several stages write the same field and one of their class, which takes functions, can replace
    them all, such as Reward; else None."""
    kinds = {type(stage) for stage in stages}
    if len(kinds) > 1 or not all(hasattr(stage, "functions") for stage in stages):
        return None
    return f"write one {kinds.pop().__name__} with the functions of all of them, or remove one of them"


def _parts(stage: Stage) -> Iterator[Problem]:
    """Yield a problem for each worker group, model, gate or field of a stage that is something else, such as a name."""
    where = str(stage.location)
    if stage.shape not in SHAPES:
        yield Problem(
            where=where,
            what=f"stage {stage.name!r} has shape={shown(stage.shape)}",
            why=f"the shape of a stage is {', '.join(SHAPES[:-1])} or {SHAPES[-1]}",
            fix=_SHAPE,
        )
    elif stage.shape != "external":
        yield from setup_problems(stage)
    for group in stage.groups():
        if not isinstance(group, WorkerGroup):
            yield Problem(
                where=where,
                what=f"stage {stage.name!r} runs on {shown(group)}",
                why="a stage runs on a WorkerGroup",
                fix=f"pass WorkerGroup({group if isinstance(group, str) else 'name'!r}, backend=...)",
            )
    models = [*stage.uses, *([] if stage.updates is None else [stage.updates])]
    for model in {id(model): model for model in models if not isinstance(model, Model)}.values():
        yield Problem(
            where=where,
            what=f"stage {stage.name!r} has the model {shown(model)}",
            why="a model is a Model, built once and given to every stage that uses it",
            fix=f"policy = Model({model if isinstance(model, str) else 'name'!r})",
        )
    if not isinstance(stage.gate, Gate | None):
        yield Problem(
            where=where,
            what=f"stage {stage.name!r} has gate={shown(stage.gate)}",
            why="a gate is a field and a maximum number of sampling rounds",
            fix="gate = Gate(KEPT, max_rounds=10)",
        )
    for kind in ("reads", "writes", "reads_back"):
        try:
            fields = getattr(stage, kind)
        except Exception as error:  # noqa: BLE001 - a property of the user's
            fields = message_of(error)
        if (
            not isinstance(fields, Sequence)
            or isinstance(fields, str)
            or not all(isinstance(field, Field) for field in fields)
        ):
            yield Problem(
                where=where,
                what=f"stage {stage.name!r} has {kind}={shown(fields)}",
                why=f"{kind} must be a tuple of Fields",
                fix=f"{kind}=(REWARD,), from stages.vocabulary, or (Field('name', dtype=...),)",
            )
