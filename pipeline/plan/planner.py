"""Makes a Plan from a graph, or reports every problem at once. Pure: loads neither torch nor ray.

The Plan is plain data: the scheduler runs it, `plan.json` stores it and `--plan` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import networkx as nx
from msgspec.structs import replace

from pipeline.declare.abilities import run_of, server_of, shown_by, stamped_by
from pipeline.declare.fields import Field
from pipeline.declare.graph import Graph
from pipeline.declare.group import WorkerGroup
from pipeline.declare.stage import Stage, kept_by
from pipeline.errors import GraphError, Problem
from pipeline.plan import checks
from pipeline.plan.gate import awaited, gate_of
from pipeline.plan.lifetimes import entry_bytes, partitions
from pipeline.plan.plan import Edge, Fence, Lifetime, PlacedGroup, Plan, PlannedStage
from pipeline.plan.pool import with_pool
from pipeline.plan.samples import KeepSamples
from pipeline.plan.schedule_checks import capacity_problems, pool_problems
from pipeline.plan.structure import structure


def with_samples(graph: Graph) -> tuple[Stage, ...]:
    """Return the graph's stages, and the stage that keeps texts and rewards for people who look at the run."""
    stages = graph.all_stages()
    kept = tuple(
        field
        for stage in stages
        if stage.shape != "external"
        for field in stage.writes
        if field in shown_by(stage) or not (field.per_step or field.ragged or field.inner or field == kept_by(stage))
    )
    return (*stages, KeepSamples(fields=kept, keep=graph.schedule.keep_groups))


def worker_groups(stages: Sequence[Stage], host: WorkerGroup) -> list[WorkerGroup]:
    """Return the distinct worker groups of `stages`, in order of first use; the host group last."""
    named = {group.name: group for stage in stages for group in stage.groups()}
    return [*named.values(), *([host] if host.name not in named else [])]


def server_groups(stages: Sequence[Stage]) -> list[WorkerGroup]:
    """Return the distinct worker groups that serve `stages`, in order of first use."""
    return list({group.name: group for stage in stages if (group := server_of(stage))}.values())


def placed_groups(stages: Sequence[Stage], host: WorkerGroup) -> list[WorkerGroup]:
    """Return all worker groups that have workers: those that run `stages`, and those that serve them."""
    return [*worker_groups(stages, host), *server_groups(stages)]


def sample_fields(stages: Sequence[Stage]) -> list[Field]:
    """Return the fields that the data plane stores, in order of writing."""
    return [field for stage in stages for field in stage.writes if not field.per_step]


def plan(graph: Graph, *, gpus: int | None = None) -> tuple[Plan, list[Problem]]:
    """Return the plan and its warnings. Raises GraphError with every problem of the graph.

    `gpus` is the number of available GPUs; None leaves that check to the executor.
    """
    problems = list(structure(graph))
    if problems:
        raise GraphError(*problems)
    stages = with_samples(graph)
    problems = list(checks.all_checks(graph, stages, gpus=gpus))
    errors = [problem for problem in problems if not problem.warning]
    if errors:
        raise GraphError(*errors)
    if errors := list(_early_and_late(stages)):
        raise GraphError(*errors)
    made = _build(graph, stages)
    if errors := list(pool_problems(graph, made.pool)):
        raise GraphError(*errors)
    return made, [*(problem for problem in problems if problem.warning), *capacity_problems(graph, made.partitions)]


def _build(graph: Graph, stages: tuple[Stage, ...]) -> Plan:
    writer = {field.name: stage.name for stage in stages for field in stage.writes}
    dag = checks.dependence(stages)
    awaits = awaited(stages, dag)
    dag.add_edges_from((writer[field.name], name) for name, fields in awaits.items() for field in fields)
    layer = {name: depth for depth, names in enumerate(nx.topological_generations(dag)) for name in names}
    schedule, fences = graph.schedule, tuple(_fences(stages))
    path = paths(stages, dag, fences)
    planned = tuple(
        _planned(stage, graph, layer[stage.name], awaits.get(stage.name, ()), path[stage.name]) for stage in stages
    )
    edges = tuple(_edges(stages, writer, awaits))
    made = Plan(
        name=graph.name,
        source=graph.source.name,
        batch=graph.batch,
        group_size=graph.group_size,
        steps=schedule.steps,
        max_staleness=schedule.max_staleness,
        ahead=schedule.ahead,
        on_stale=schedule.on_stale,
        refit=schedule.refit,
        capacity=schedule.capacity or (schedule.max_staleness + 2) * graph.batch,
        checkpoint_every=schedule.checkpoint_every,
        stages=planned,
        edges=edges,
        fences=fences,
        lifetimes=tuple(
            Lifetime(field=name, writer=by, readers=tuple(e.reader for e in edges if e.field == name))
            for name, by in writer.items()
        ),
        groups=tuple(_placed(group, planned) for group in worker_groups(stages, graph.host)),
        weights_fields=tuple(field.name for stage in stages for field in stage.writes if field.per_step),
        gate=gate_of(stages, graph.batch),
        partitions=partitions(graph.name, stages, dag, graph.group_size),
        capacity_bytes=schedule.capacity_bytes,
        servers=tuple(_serving(group, stages) for group in server_groups(stages)),
    )
    return with_pool(made)


def _planned(stage: Stage, graph: Graph, layer: int, awaits: Sequence[Field], path: int) -> PlannedStage:
    """Return a stage as the plan describes it."""
    host = (graph.host.name,) if stage.shape != "external" else ()
    stamps = stamped_by(stage)
    return PlannedStage(
        name=stage.name,
        kind=type(stage).__name__,
        shape=stage.shape,
        per=stage.per,
        groups=tuple(group.name for group in stage.groups()) or host,
        reads=tuple(field.name for field in stage.reads),
        writes=tuple(field.name for field in stage.writes),
        reads_back=tuple(field.name for field in stage.reads_back),
        uses=tuple(checks.model_name(model) for model in stage.uses),
        updates=checks.model_name(stage.updates) if stage.updates else None,
        every=stage.every,
        first_groups=stage.keep if isinstance(stage, KeepSamples) else None,
        chooses=tuple(field.name for field in stage.chooses) if isinstance(stage, KeepSamples) else (),
        sharding=stage.sharding,
        layer=layer,
        where=str(stage.location),
        timeout_s=stage.timeout_s if stage.shape == "external" else None,  # type: ignore[attr-defined]
        awaits=tuple(field.name for field in awaits),
        run_groups=run_groups(stage, graph),
        stamps=stamps.name if stamps else None,
        path=path,
    )


def _edges(stages: Sequence[Stage], writer: Mapping[str, str], awaits: Mapping[str, Sequence[Field]]) -> Iterator[Edge]:
    """Yield an edge per field that a stage reads, reads back or waits for; `writer` is by field, `awaits` by stage."""
    for stage in stages:
        for fields, back, fetched in (
            (stage.reads, False, True),
            (stage.reads_back, True, True),
            (awaits.get(stage.name, ()), False, False),
        ):
            for field in fields:
                yield Edge(
                    field=field.name,
                    writer=writer[field.name],
                    reader=stage.name,
                    back=back,
                    bytes_per_sample=entry_bytes(field) if fetched else 0,
                    ragged=field.ragged,
                )


def _placed(group: WorkerGroup, planned: Sequence[PlannedStage]) -> PlacedGroup:
    """Return a worker group as the plan describes it."""
    return PlacedGroup(
        name=group.name,
        backend=str(group.backend),
        workers=group.processes,
        gpus=group.gpus,
        cpus=group.cpus * group.workers / group.processes,
        threads=group.threads or 0,
        model_parallel=group.processes // group.data_parallel,
        stages=tuple(stage.name for stage in planned if group.name in stage.groups),
        colocated=group.colocated.name if group.colocated else None,
        leads=group.leads,
        python=group.interpreter,
    )


def _serving(group: WorkerGroup, stages: Sequence[Stage]) -> PlacedGroup:
    """Return a worker group that serves some of the stages as the plan describes it."""
    serves = tuple(stage.name for stage in stages if server_of(stage) == group)
    return replace(_placed(group, ()), serves=serves)


def run_groups(stage: Stage, graph: Graph) -> int | None:
    """Return the number of groups per run of a stage per batch; None if it starts on the whole batch.

    If ranks meet in the stage, every run must divide evenly over them.
    """
    samples = run_of(stage)
    if not samples or stage.per != "batch":
        return None
    groups = -(-samples // graph.group_size)
    if groups >= graph.batch:
        return None
    if stage.sharding and stage.sharding.equal:
        ranks = stage.on.data_parallel if stage.on else 1
        runs = {groups, graph.batch % groups or groups}
        if any(run * graph.group_size % ranks for run in runs):
            return None
    return groups


def paths(stages: Sequence[Stage], dag: nx.DiGraph, fences: Sequence[Fence]) -> dict[str, int]:
    """Return `path` of each stage: the number of stages on the longest path to the weights of its step."""
    order = nx.DiGraph(dag)
    order.add_edges_from((fence.before, fence.after) for fence in fences if fence.lag == 0)
    ends = {stage.name for stage in stages if stage.updates or stage.shape == "transfer"}
    path: dict[str, int] = {}
    for name in reversed(list(nx.topological_sort(order))):
        behind = max((path[after] for after in order.successors(name)), default=0)
        path[name] = behind + 1 if behind or name in ends or not ends else 0
    return path


def _early_and_late(stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yield a problem for each stage that must finish before a stage that trains, and needs what that one leads to."""
    dag = checks.dependence(stages)
    named = {stage.name: stage for stage in stages}
    for fence in _fences(stages):
        if fence.lag == 0 and fence.before in nx.descendants(dag, fence.after):
            user = named[fence.before]
            home = user.groups()[0].name
            sent = [s.groups()[1].name for s in stages if s.shape == "transfer" and s.groups()[0].name == home]
            yield Problem(
                where=str(user.location),
                what=f"stage {user.name!r} uses the weights that {fence.after!r} trains on worker group {home!r}, "
                f"and reads what {fence.after!r} leads to",
                why=f"it must finish before {fence.after!r} changes the weights",
                fix=f"put it on {' or '.join(map(repr, sent)) or 'another worker group'}, with on=",
            )


def _fences(stages: Sequence[Stage]) -> list[Fence]:
    """Return the order among stages that share a model's mutable weights, which presence does not ensure."""
    fences = []
    transfers = [stage for stage in stages if stage.shape == "transfer"]
    for trainer in (stage for stage in stages if stage.updates):
        home = trainer.groups()
        for user in stages:
            if (
                user is not trainer
                and user.shape != "transfer"
                and user.groups() == home
                and trainer.updates in user.uses
            ):
                fences += [
                    Fence(before=trainer.name, after=user.name, lag=1, why="uses the weights of the step before"),
                    Fence(before=user.name, after=trainer.name, lag=0, why="the weights must not change while it runs"),
                ]
        for transfer in transfers:
            if transfer.groups()[:1] == home:
                fences.append(
                    Fence(before=transfer.name, after=trainer.name, lag=1, why="the weights must not change while sent")
                )
        if not any(fence.after == trainer.name and fence.lag for fence in fences):
            fences.append(Fence(before=trainer.name, after=trainer.name, lag=1, why="one step follows the other"))
    for transfer in transfers:
        target = transfer.groups()[1:]
        for user in stages:
            if user.shape != "transfer" and user.groups() == target and user.uses and not user.reads_back:
                fences.append(Fence(before=user.name, after=transfer.name, lag=1, why="uses the weights served so far"))
    return fences
