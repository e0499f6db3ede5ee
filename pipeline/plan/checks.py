"""The static checks of a graph. Each yields problems; none stops at the first. Loads neither torch nor ray."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import networkx as nx

from pipeline.declare.fields import ANY, Field
from pipeline.declare.graph import Graph
from pipeline.declare.group import Model
from pipeline.declare.parameters import Rule, at_least, broken, is_whole, one_of
from pipeline.declare.stage import Stage, kept_by
from pipeline.errors import Problem, line_of_code, problems_of
from pipeline.plan.gate import gate_problems
from pipeline.plan.group_checks import group_problems, group_values
from pipeline.plan.schedule_checks import schedule_problems, timing_problems
from pipeline.plan.structure import one_for_all

BATCH = Rule(
    "batch", lambda value: is_whole(value, 1), "a step needs a whole number of groups, 1 or more", "write batch=32"
)
_GROUP_SIZE = Rule(
    "group_size",
    lambda value: is_whole(value, 1) and value <= 999,
    "a group has a whole number of samples, 1 to 999",
    "samples_per_prompt=8",
)
_RULES = (
    one_of(
        "per",
        ("sample", "group", "batch"),
        why="per must be 'sample', 'group' or 'batch'",
        fix="per='sample', 'group' or 'batch'",
    ),
    at_least("every", 1, why="the stage runs at every n-th step, n >= 1"),
)
_ANNOTATIONS = {"str": "str", "float32": "float", "int64": "int", "bool": "bool"}  # of a reward's parameters


def all_checks(graph: Graph, stages: Sequence[Stage], *, gpus: int | None) -> Iterator[Problem]:
    """Yield the problems of a graph whose structure is right. A problem that two checks find is reported once."""
    own = {
        stage.name: _own(stage, graph)
        for stage in graph.all_stages()
        # wrong groups are reported by `group_problems`
        if not any(problem for group in stage.groups() for problem in group_values(group))
    }
    lost = [stage.name for stage in stages if not stage.groups() and own.get(stage.name)]
    found = [
        *schedule_problems(graph),
        *timing_problems(stages),
        *_source(graph),
        *_writers(stages),
        *_cycles(stages),
        *_shapes(stages),
        *_shardings(stages),
        *gate_problems(stages, dependence(stages)),
        *group_problems(graph, stages, gpus),
        *_models([stage for stage in stages if stage.name not in lost]),
    ]
    yield from dict.fromkeys([*found, *(problem for problems in own.values() for problem in problems)])


def _own(stage: Stage, graph: Graph) -> list[Problem]:
    """Return the problems that the stage's own check finds."""
    kind = type(stage).__name__
    return problems_of(
        stage.check,
        graph,
        says=f"check() of stage {stage.name!r}",
        where=str(stage.location),
        why="a parameter has a type that the stage does not expect, or its check() is wrong",
        fix=f"correct {kind}.check()" if line_of_code(stage.check) else f"correct the parameters of {kind}(...)",
    )


def _source(graph: Graph) -> Iterator[Problem]:
    source = graph.source
    if source.reads:
        yield Problem(
            where=str(source.location),
            what=f"source {source.name!r} reads {_names(source.reads)}",
            why="a source has no inputs",
            fix="move it to the stages and use Prompts(...) as source",
        )
    if hasattr(source, "batch"):
        yield from broken([BATCH], source, where=str(source.location))
    makers = [stage for stage in graph.all_stages() if stage.group_size is not None]
    if len(makers) > 1:
        yield Problem(
            where=" and ".join(str(stage.location) for stage in makers),
            what=f"{len(makers)} stages make samples ({_names(makers)})",
            why="all groups of a graph have one size",
            fix="keep one rollout",
        )
    for maker in makers:
        says = f"stage {maker.name!r} makes {maker.group_size!r} samples of each prompt"
        yield from broken([_GROUP_SIZE], maker, where=str(maker.location), says=says)


def _writers(stages: Sequence[Stage]) -> Iterator[Problem]:
    writers: dict[str, list[tuple[Stage, Field]]] = {}
    for stage in stages:
        for field in stage.writes:
            writers.setdefault(field.name, []).append((stage, field))
    for name, pairs in writers.items():
        gates = all(kept_by(stage) == field for stage, field in pairs)  # `gate_problems` reports these
        if len(pairs) > 1 and not gates:
            both = " and ".join(f"{stage.name!r} ({stage.location})" for stage, _ in pairs)
            transfers = all(stage.shape == "transfer" for stage, _ in pairs)
            yield Problem(
                where=str(pairs[1][0].location),
                what=f"field {name!r} is written by {both}",
                why="a served model has one Refit" if transfers else "a field has one writer",
                fix="remove one Refit"
                if transfers
                else one_for_all([stage for stage, _ in pairs]) or "remove one of them, or rename its field",
            )
    read: set[str] = set()
    for stage in stages:
        for field in (*stage.reads, *stage.reads_back):
            read.add(field.name)
            if field.name not in writers:
                yield Problem(
                    where=str(stage.location),
                    what=f"stage {stage.name!r} reads {field.name!r}, which no stage writes",
                    why="every field that a stage reads must be written by another stage",
                    fix=_way_to(field, stage, writers),
                )
                continue
            if field in stage.reads_back and not field.per_step:
                yield Problem(
                    where=str(stage.location),
                    what=f"stage {stage.name!r} has {field.name!r} in reads_back",
                    why="samples of an earlier step are no longer there; reads_back is for weights",
                    fix=f"move {field.name!r} to reads",
                )
            by, written = writers[field.name][0]
            if not written.agrees_with(field):
                yield Problem(
                    where=str(stage.location),
                    what=f"stage {stage.name!r} reads {field.name!r} as {_type(field)}, "
                    f"{by.name!r} writes {_type(written)}",
                    why="reader and writer must declare the same dtype, dims and unit",
                    fix=_declared_as(field, written, stage),
                )
    read |= {stage.gate.field.name for stage in stages if stage.gate}  # stages wait for it
    for name, pairs in writers.items():
        if pairs[0][1].dtype == ANY:
            yield Problem(
                where=str(pairs[0][0].location),
                what=f"stage {pairs[0][0].name!r} writes {name!r} as any",
                why="readers may take a field as it is written, so its writer says what it is",
                fix=f"Field({name!r}, dtype='float32'), or another dtype",
            )
        if name not in read:
            yield Problem(
                where=str(pairs[0][0].location),
                what=f"field {name!r} of {pairs[0][0].name!r} is not read by any stage",
                why="it is written and cleared for nothing",
                fix="remove it, or add a stage that reads it",
                warning=True,
            )


def _way_to(field: Field, stage: Stage, written: Mapping[str, Sequence[tuple[Stage, Field]]]) -> str:
    """Return the fix for a field that `stage` reads and no stage writes."""
    if field.hint:
        return field.hint
    others = [
        name
        for name, pairs in written.items()
        if name not in {read.name for read in stage.reads} and pairs[0][1].per_step == field.per_step
    ]
    near = difflib.get_close_matches(field.name, others, n=1)
    near = near or [name for name in others if field.name.startswith(f"{name}_")]
    add = f"add a stage that writes {field.name!r}"
    if field.dims == "N":
        lacking = [one.name for one in stage.reads if one.name not in written and one.dims == "N" and not one.hint]
        add += f", or, if it is a column of the data, Prompts(..., extra={tuple(lacking)!r})"
    if near:
        return f"did you mean {near[0]!r}? If not, {add}"
    samples = sorted(name for name in others if not written[name][0][1].per_step)
    return f"{add}; available fields: {', '.join(samples)}" if samples else add


def dependence(stages: Sequence[Stage]) -> nx.DiGraph:
    """Return the graph of stages within one step. Each edge has the name of its field."""
    graph = nx.DiGraph()
    writer = {field.name: stage.name for stage in stages for field in stage.writes}
    graph.add_nodes_from(stage.name for stage in stages)
    for stage in stages:
        for field in stage.reads:
            if field.name in writer:
                graph.add_edge(writer[field.name], stage.name, field=field.name)
    return graph


def _cycles(stages: Sequence[Stage]) -> Iterator[Problem]:
    graph = dependence(stages)
    where = {stage.name: str(stage.location) for stage in stages}
    for component in nx.strongly_connected_components(graph):
        if len(component) > 1 or any(graph.has_edge(name, name) for name in component):
            cycle = nx.find_cycle(graph.subgraph(component), source=min(component))
            path = " ".join(f"{a} -[{graph.edges[a, b]['field']}]->" for a, b in cycle) + f" {cycle[0][0]}"
            yield Problem(
                where=where[cycle[0][0]],
                what=f"the stages form a cycle: {path}",
                why="within a step, a field must be written before it is read",
                fix="read one of these fields from the step before (reads_back), or remove the read",
            )


def _shapes(stages: Sequence[Stage]) -> Iterator[Problem]:
    for stage in stages:
        where, groups = str(stage.location), stage.groups()
        names = [group.name for group in groups]
        if stage.shape == "transfer" and len(set(names)) != 2:
            alike = len(set(map(id, groups))) == 2
            yield Problem(
                where=where,
                what=f"both worker groups of transfer {stage.name!r} are named {names[0]!r}"
                if alike
                else f"transfer {stage.name!r} names {len(set(names))} worker group",
                why="a transfer needs two worker groups, a source and a target",
                fix="rename one of them" if alike else "source=learner, target=sampler",
            )
        yield from broken(_RULES, stage, where=where, says=f"stage {stage.name!r} has {{}}")
        if not is_whole(stage.every, 1):
            continue
        if stage.every > 1 and any(not field.per_step for field in stage.writes):
            yield Problem(
                where=where,
                what=f"stage {stage.name!r} has every={stage.every} and writes {_names(stage.writes)}",
                why="at the steps in between, its readers would wait forever",
                fix="every=1",
            )


def _shardings(stages: Sequence[Stage]) -> Iterator[Problem]:
    for stage in stages:
        if stage.sharding is None:
            for group in stage.groups() if stage.updates else ():
                if is_whole(group.workers, 2):
                    yield Problem(
                        where=str(stage.location),
                        what=f"stage {stage.name!r} updates a model on {group.workers} workers and has no sharding",
                        why="it would run on one of them, and the others would keep the old weights",
                        fix=f"declare its sharding, or WorkerGroup({group.name!r}, ..., workers=1)",
                    )
            continue
        read = {field.ragged for field in stage.reads}
        if stage.shape != "map" or stage.per != "batch" or not set(stage.sharding.lengths) <= read:
            yield Problem(
                where=str(stage.location),
                what=f"stage {stage.name!r} has sharding; it is a {stage.shape} stage per {stage.per} "
                f"and reads {', '.join(field.name for field in stage.reads) or 'nothing'}",
                why="a batch is divided by the lengths of its prompts and responses, once it is complete",
                fix=f"per='batch', and read fields with the dims {' and '.join(stage.sharding.lengths)}",
            )


def _models(stages: Sequence[Stage]) -> Iterator[Problem]:
    trainers = [stage for stage in stages if stage.updates]
    transfers = [stage for stage in stages if stage.shape == "transfer"]
    for stage in trainers:
        if stage.updates and not stage.updates.trainable:
            yield Problem(
                where=str(stage.location),
                what=f"stage {stage.name!r} updates the frozen model {stage.updates.source!r}",
                why="a frozen model never changes",
                fix="pass the model itself, not model.frozen()",
            )
    updated: dict[Model, Stage] = {}
    for stage in trainers:
        if stage.updates:
            other = updated.setdefault(stage.updates, stage)
            if other is not stage:
                yield Problem(
                    where=str(stage.location),
                    what=f"{other.name!r} and {stage.name!r} both update {stage.updates.source!r}",
                    why="a model's weights have one owner",
                    fix="remove one of them",
                )
    for stage in stages:
        for model in stage.uses if stage.shape != "transfer" else ():
            trainer = updated.get(model)
            if trainer is None or stage.groups() == trainer.groups():
                continue
            if not any(t.groups()[1:] == stage.groups() and model in t.uses for t in transfers):
                yield Problem(
                    where=str(stage.location),
                    what=f"stage {stage.name!r} uses {model.source!r} on {_names(stage.groups())}, "
                    "where nothing updates it",
                    why=f"{trainer.name!r} updates it on {_names(trainer.groups())}",
                    fix=f"run it on {_names(trainer.groups())}"
                    + (f", or add a Refit to {_names(stage.groups())}" if stage.groups() else "")
                    if trainer.groups()
                    else f"run {trainer.name!r} on {_names(stage.groups())}",
                )


def model_name(model: Model) -> str:
    """Return a model's name in a plan."""
    return model.source if model.trainable else f"{model.source} (frozen)"


def _names(items: Iterable) -> str:
    return ", ".join(repr(item.name) for item in items) or "the host group"


def _type(field: Field) -> str:
    return f"{field.dtype} [{field.dims or 'a step'}]{'' if field.unit == '1' else f' in {field.unit!r}'}"


def _declared_as(field: Field, written: Field, stage: Stage) -> str:
    """Return the fix for a field that `stage` reads as another type than the one written."""
    fix = f"declare it as {_type(written)} in {stage.name!r}"
    if field.dims == written.dims == "N" and written.dtype in _ANNOTATIONS:
        fix += f"; for a function's parameter, write {field.name}: {_ANNOTATIONS[written.dtype]}"
    if written.dtype == "str" and field.dims == "N":
        fix += f"; if it is a column of numbers, Prompts(..., extra=(Field({field.name!r}, dtype={field.dtype!r}),))"
    return fix
