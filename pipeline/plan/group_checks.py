"""Checks of the worker groups of a graph. Pure, except that the file of a group's own interpreter must exist."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm

from pipeline.declare import interpreter
from pipeline.declare.abilities import server_of
from pipeline.declare.backend import PLAIN
from pipeline.declare.graph import Graph
from pipeline.declare.group import CACHES, WEIGHTS, Model, WorkerGroup
from pipeline.declare.parameters import Rule, at_least, broken, number, one_of, truth
from pipeline.declare.stage import Stage
from pipeline.errors import Problem, counted, shown
from pipeline.plan.names import group_name_problem


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))


_RULES = (
    at_least("workers", 1),
    at_least("gpus", 0),
    at_least("threads", 1).optional(),
    *(at_least(f"{kind}_parallel", 1) for kind in ("tensor", "context", "pipeline", "expert")),
    at_least("expert_tensor_parallel", 1).optional(),
    one_of(
        "fetch",
        ("auto", "independent", "leader"),
        why="workers that need the same samples each fetch them, or one fetches for all",
        fix="fetch='auto', 'independent' or 'leader'",
    ),
    truth("fully_sharded", why="True shards the weights over the workers, False does not", fix=True),
    number("cpus", lambda value: value >= 0, why="cpus must be a number, 0 or more", fix=1.0),
    number(
        "memory",
        lambda value: 0 < value <= 1,
        why="memory must be a share of each GPU, above 0, at most 1",
        fix=0.85,
    ),
    one_of("cache", CACHES, why="the cache has the model's number format, or 8-bit floats", fix="cache='auto'"),
    one_of("weights", WEIGHTS, why="weights have the model's number format, or 8-bit floats", fix="weights='auto'"),
    at_least("speculate", 0, most=128, why="speculate is the tokens drafted in each step, at most 128; 0 is off"),
    Rule("draft", lambda value: isinstance(value, Model | None), "a Model drafts tokens, or none", "draft=Model(...)"),
    Rule(
        "python",
        lambda value: value is None or _is_path(value),
        "python is the path of the interpreter that runs the workers",
        "python='venv/bin/python'",
    ),
)


def group_problems(graph: Graph, stages: Sequence[Stage], gpus: int | None) -> Iterator[Problem]:
    """Yield the problems of each group, and of the resources of all groups together."""
    groups: dict[str, WorkerGroup] = {}
    serving = {group.name: group for stage in stages if (group := server_of(stage))}
    for group in (graph.host, *(group for stage in stages for group in stage.groups()), *serving.values()):
        known = groups.setdefault(group.name, group)
        if known != group:
            yield Problem(
                where=str(group.location),
                what=f"two different worker groups are named {group.name!r}",
                why="a name stands for one group of processes",
                fix="build it once and pass the same object",
            )
    usable = []
    for group in groups.values():
        wrong = list(group_values(group))
        yield from wrong
        usable += [] if wrong else [group]
    for group in usable:
        if group.name in serving:
            yield from _serving(group, graph, stages)
            continue
        for what, why, fix in (*_division(group, graph.batch), *_formats(group), *_speculation(group)):
            says = f"worker group {group.name!r} has {what}"
            yield Problem(where=str(group.location), what=says, why=why, fix=fix)
        for what, why, fix in _colocated(group, groups, graph) if group.colocated is not None else ():
            says = f"worker group {group.name!r} has colocated={what}"
            yield Problem(where=str(group.location), what=says, why=why, fix=fix)
    owners = [group for group in usable if group.gpus and group.colocated is None]
    asked = sum(group.gpus for group in owners)
    if gpus is not None and asked > gpus:
        parts = ", ".join(f"{group.name} {group.gpus}" for group in owners)
        yield Problem(
            where=str(graph.location),
            what=f"the worker groups ask for {counted(asked, 'GPU')} ({parts}), {gpus} available",
            why="every group holds its GPUs for the whole run",
            fix="use fewer GPUs per group, or more machines",
        )


def _serving(group: WorkerGroup, graph: Graph, stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yield what a group that serves stages has and cannot: its workers wait for others, and compute with no model."""
    served = next(stage for stage in stages if (server := server_of(stage)) and server.name == group.name)
    homes = {stage.name: stage.groups() or (graph.host,) for stage in stages}
    runs = [name for name, home in homes.items() if group.name in {one.name for one in home}]
    alone, plain = "its workers wait for those of that stage", "its workers compute with no model"
    for is_wrong, what, why, fix in (
        (runs, f"runs stage {next(iter(runs), '')!r}", alone, "a WorkerGroup of its own for one of them"),
        (group.backend != PLAIN.name, f"has backend={group.backend!r}", plain, "leave out backend="),
        (group.gpus, f"has {counted(group.gpus, 'GPU')}", plain, "gpus=0"),
        (group.model_parallel != 1, "divides a model over its workers", plain, "workers= alone"),
        (group.colocated is not None, "shares the GPUs of another group", plain, "leave out colocated="),
    ):
        if is_wrong:
            says = f"worker group {group.name!r} serves stage {served.name!r} and {what}"
            yield Problem(where=str(group.location), what=says, why=why, fix=fix)


def _formats(group: WorkerGroup) -> Iterator[tuple[str, str, str]]:
    """Yield the number formats that only vLLM has, and only on GPUs."""
    on = f"the backend {group.backend!r} on {counted(group.gpus, 'GPU')}"
    for name, value, has in (("cache", group.cache, "such a cache"), ("weights", group.weights, "such weights")):
        if value != "auto" and not (group.leads and group.gpus):
            yield f"{name}={value!r} and {on}", f"only vLLM on GPUs has {has}", f"{name}='auto'"


def _speculation(group: WorkerGroup) -> Iterator[tuple[str, str, str]]:
    if group.speculate and not group.leads:
        yield f"speculate={group.speculate} and the backend {group.backend!r}", "only vLLM drafts tokens", "speculate=0"
    elif group.draft is not None and not group.speculate:
        yield "a draft and speculate=0", "no token is drafted", "speculate=4, or leave out draft"


def _division(group: WorkerGroup, batch: int) -> Iterator[tuple[str, str, str]]:
    """Yield what a group has that does not divide evenly, why it must, and a fix."""
    alike = "workers" if group.model_parallel == 1 else "data-parallel replicas"
    if group.gpus % group.workers:
        what = f"{counted(group.gpus, 'GPU')} and {counted(group.workers, 'worker')}"
        yield what, "GPUs are divided evenly over the workers", f"gpus={group.workers} or a multiple"
    elif group.workers % group.model_parallel:
        kinds = ("tensor", group.tensor_parallel), ("context", group.context_parallel)
        product = " x ".join(f"{size} {kind}" for kind, size in (*kinds, ("pipeline", group.pipeline_parallel)))
        why = "workers are data x tensor x context x pipeline parallel"
        yield f"{group.workers} workers, and {product} parallel", why, f"workers={group.model_parallel} or a multiple"
    elif experts := _expert_division(group):
        yield experts
    elif batch % group.data_parallel:
        what, why = (
            f"{group.data_parallel} {alike}, a batch has {batch} groups",
            "the batch size must be a multiple of the data-parallel size",
        )
        yield what, why, _fewer(batch, group)
    if group.fetch == "leader" and group.model_parallel == 1:
        why = "a leader fetches for workers that need the same samples, and here all need different ones"
        yield "fetch='leader' and no model parallelism", why, "fetch='auto'"


def _expert_division(group: WorkerGroup) -> tuple[str, str, str] | None:
    """Return why the workers of a pipeline stage cannot divide the experts; None if they can."""
    tensor = group.expert_tensor_parallel or group.tensor_parallel
    workers, needed = group.workers // group.pipeline_parallel, group.expert_parallel * tensor
    inside = group.tensor_parallel * group.context_parallel  # workers of a replica in one pipeline stage
    if group.tensor_parallel % tensor:
        what = f"expert_tensor_parallel={tensor} and tensor_parallel={group.tensor_parallel}"
        why = "an expert is divided over all or some of the tensor-parallel workers"
        return what, why, "expert_tensor_parallel=1, or a divisor of tensor_parallel"
    if needed % inside and inside % needed:
        sizes = [f"expert_parallel={group.expert_parallel}", f"expert_tensor_parallel={tensor}"]
        sizes += [f"tensor_parallel={group.tensor_parallel}"]
        sizes += [f"context_parallel={group.context_parallel}"] if group.context_parallel > 1 else []
        what = f"{', '.join(sizes[:-1])} and {sizes[-1]}"
        why = "the workers that hold all experts once are part of one replica, or one or more whole replicas"
        return what, why, f"expert_parallel={inside // tensor} or a multiple"
    if workers % needed:
        what = f"expert_parallel={group.expert_parallel} and {workers} workers per pipeline stage"
        product = f"expert_parallel x expert_tensor_parallel = {group.expert_parallel} x {tensor}"
        why = f"the experts are divided over {product} of these workers"
        least = lcm(needed, inside) * group.pipeline_parallel
        return what, why, f"expert_parallel=1, or workers={least} or a multiple"
    return None


def _colocated(group: WorkerGroup, groups: Mapping[str, WorkerGroup], graph: Graph) -> Iterator[tuple[str, str, str]]:
    """Yield why a group cannot share the GPUs of another: the other group, the reason, and a fix."""
    other = group.colocated
    if not isinstance(other, WorkerGroup):
        yield shown(other), "it is the worker group whose GPUs this one shares", "pass the WorkerGroup, or nothing"
        return
    name, ahead = repr(other.name), graph.schedule.max_staleness
    if other.name not in groups or other.name == group.name or other.backend == PLAIN.name:
        what = f"{name}, which runs no stage with a model" if other.name != group.name else name
        why = "two groups that compute with models take turns on the GPUs of one"
        yield what, why, "pass the group of the other stages"
    elif other.colocated is not None:
        why = "one group owns the GPUs, the others share them"
        yield f"{name}, which itself is colocated", why, "name the group that owns the GPUs"
    elif group.gpus != other.gpus:
        what = f"{name} and {counted(group.gpus, 'GPU')}; that group has {other.gpus}"
        yield what, "both use the same GPUs", f"gpus={other.gpus}"
    elif ahead:
        why = "groups that take turns on the same GPUs cannot run ahead"
        what, fix = (
            f"{name}, and the schedule max_staleness={ahead}",
            "max_staleness=0, or separate GPUs for each group",
        )
        yield what, why, fix


def group_values(group: WorkerGroup) -> Iterator[Problem]:
    """Yield the problems of a worker group's name and values."""
    yield from group_name_problem(group)
    yield from broken(_RULES, group, where=str(group.location), says=f"worker group {group.name!r} has {{}}")
    if _is_path(group.python):
        yield from _interpreter(group)


def _interpreter(group: WorkerGroup) -> Iterator[Problem]:
    """Yield why the file of a group's interpreter cannot be one."""
    path = str(group.interpreter)
    if interpreter.is_elsewhere():
        return
    if why := interpreter.not_usable(path):
        yield Problem(
            where=str(group.location),
            what=f"worker group {group.name!r} has python={os.fspath(group.python or '')!r}",
            why=f"{why}: {path}",
            fix="create the environment, or correct the path; a relative one is relative to the working directory",
        )


def one_process_problems(groups: Iterable[WorkerGroup]) -> Iterator[Problem]:
    """Yield why one process cannot run the stages of all these groups: it has one interpreter."""
    for group in groups:
        if group.python is not None:
            yield Problem(
                where=str(group.location),
                what=f"worker group {group.name!r} has python={os.fspath(group.python)!r}, and the executor is 'local'",
                why="it runs all stages in one process, which has one interpreter",
                fix="--executor ray, or leave out python",
            )


def _fewer(batch: int, group: WorkerGroup) -> str:
    """Return the fix of replicas that do not divide the batch."""
    if group.data_parallel > batch:
        return f"use at most {batch * group.model_parallel} workers, or a larger batch"
    return f"use a batch that is a multiple of {group.data_parallel}"
