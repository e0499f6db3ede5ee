"""The gate of a graph: the one stage that keeps or drops whole groups, and the stages that wait for it. Pure.

A stage with a `gate` writes the gate's field for the groups that it keeps. Stages that it depends on run before it and
see every sampled group. Every other stage that reads or writes samples runs after it and waits for the field, but
fetches it only if it reads it. Fields written by processes outside the graph come before the gate, because those
processes cannot know which groups were dropped: the gate decides on a group once all of these fields have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx

from pipeline.declare.fields import Field
from pipeline.declare.parameters import at_least, broken
from pipeline.declare.stage import Stage
from pipeline.errors import Problem
from pipeline.plan.plan import ADDED, PlannedGate

_ROUNDS = at_least(
    "max_rounds",
    2,
    why="it must be a whole number: the first round is the batch, and later ones replace what was dropped",
    fix=10,
)


def gate_of(stages: Sequence[Stage], batch: int) -> PlannedGate | None:
    """Return the gate of a graph; None if every group is kept."""
    for stage in stages:
        if stage.gate:
            gate = stage.gate
            return PlannedGate(
                stage=stage.name,
                field=gate.field.name,
                max_groups=gate.max_rounds * batch,
                fault=gate.fault,
                most_faults=gate.most_faults,
            )
    return None


def awaited(stages: Sequence[Stage], dag: nx.DiGraph) -> dict[str, tuple[Field, ...]]:
    """Return the fields that each stage waits for without reading them. `dag`: see `checks.dependence`."""
    gate = next((stage for stage in stages if stage.gate), None)
    if gate is None or gate.gate is None:
        return {}
    kept = gate.gate.field
    behind = {stage.name: stage for stage in _behind(stages, dag)}
    read = {field.name for stage in stages for field in stage.reads}
    outside = [field for stage in stages if stage.shape == "external" for field in stage.writes if field.name in read]
    waits = {name: (kept,) for name, stage in behind.items() if kept not in stage.reads}
    return waits | {gate.name: tuple(field for field in outside if field not in gate.reads)}


def gate_problems(stages: Sequence[Stage], dag: nx.DiGraph) -> Iterator[Problem]:
    """Yield the problems of a graph's gates."""
    gates = [stage for stage in stages if stage.gate]
    if len(gates) > 1:
        yield Problem(
            where=" and ".join(dict.fromkeys(str(stage.location) for stage in gates)),
            what=f"{len(gates)} stages drop groups ({', '.join(repr(stage.name) for stage in gates)})",
            why="a batch is filled with the groups that one stage keeps",
            fix="keep one of them, with a rule that combines all of theirs",
        )
        return
    for gate in gates:
        where, kept = str(gate.location), gate.gate
        assert kept
        if kept.field not in gate.writes or gate.shape != "map" or gate.per == "batch":
            yield Problem(
                where=where,
                what=f"stage {gate.name!r} has a gate; it is a {gate.shape} stage per {gate.per} and writes "
                f"{', '.join(repr(field.name) for field in gate.writes) or 'nothing'}",
                why="a gate decides on groups as they arrive, and writes its field for the groups that it keeps",
                fix="use a map stage with per='group' and the gate's field among its writes",
            )
        yield from broken([_ROUNDS], kept, where=where, says=f"stage {gate.name!r} has {{}}")
        before = nx.ancestors(dag, gate.name) if gate.name in dag else set()
        for stage in stages:
            if stage.name in before and stage.per == "batch" and _holds(stage):
                yield Problem(
                    where=str(stage.location),
                    what=f"stage {stage.name!r} starts on whole batches and runs before {gate.name!r}, which depends "
                    "on it",
                    why=f"there is no batch until {gate.name!r} has filled it",
                    fix=f"use per='group', or a rule that does not depend on {stage.name!r}",
                )
        if not any(stage.name != ADDED for stage in _behind(stages, dag)):
            yield Problem(
                where=where,
                what=f"no stage follows {gate.name!r}",
                why="it decides which groups the later stages see",
                fix=f"add stages after it, such as Advantage(...) and Train(...), or remove {gate.name!r}",
            )


def _behind(stages: Sequence[Stage], dag: nx.DiGraph) -> list[Stage]:
    """Return the stages that must not see a dropped group."""
    gate = next(stage for stage in stages if stage.gate)
    before = {gate.name, *nx.ancestors(dag, gate.name)}
    return [stage for stage in stages if stage.name not in before and stage.shape != "external" and _holds(stage)]


def _holds(stage: Stage) -> bool:
    return any(not field.per_step for field in (*stage.reads, *stage.writes))
