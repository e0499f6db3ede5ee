"""Whether a plan that was read from a file can be one that a planner made: its numbers and its names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pipeline.plan.plan import Plan

LARGEST = 10**9


def contradictions(plan: Plan) -> Iterator[str]:
    """Yield what contradicts itself in a plan."""
    stages = [stage.name for stage in plan.stages]
    groups = [group.name for group in plan.groups]
    placed_groups = [group.name for group in plan.placed]
    for kind, names in (("stage", stages), ("worker group", placed_groups)):
        yield from (f"it has the {kind} {name!r} twice" for name in dict.fromkeys(names) if names.count(name) > 1)
    for name in ("batch", "group_size", "steps"):
        if not 1 <= getattr(plan, name) <= LARGEST:
            yield f"its {name} is {getattr(plan, name)}"
    for name in ("max_staleness", "ahead", "capacity", "checkpoint_every"):
        if not 0 <= getattr(plan, name) <= LARGEST:
            yield f"its {name} is {getattr(plan, name)}"
    for group in plan.placed:
        if not (0 <= group.workers <= LARGEST and 1 <= group.model_parallel <= max(1, group.workers)):
            yield f"group {group.name!r} has {group.workers} workers, {group.model_parallel} for one model"
    for stage in plan.stages:
        if not (1 <= stage.every <= LARGEST and 0 <= stage.layer < len(stages)):
            yield f"stage {stage.name!r} has every={stage.every} and layer={stage.layer}"
        if not stage.groups and stage.shape != "external":
            yield f"stage {stage.name!r} has no worker group"
    for edge in plan.edges:
        yield from _unknown("stage", (edge.writer, edge.reader), stages, f"the edge of {edge.field!r}")
    for fence in plan.fences:
        yield from _unknown("stage", (fence.before, fence.after), stages, "a fence")
    for lifetime in plan.lifetimes:
        yield from _unknown("stage", (lifetime.writer, *lifetime.readers), stages, f"the field {lifetime.field!r}")
    for placed in plan.placed:
        yield from _unknown("stage", (*placed.stages, *placed.serves), stages, f"group {placed.name!r}")
    fields = set(chain.from_iterable(stage.writes for stage in plan.stages))
    for stage in plan.stages:
        yield from _unknown("group", stage.groups, groups, f"stage {stage.name!r}")
        yield from _unknown("field", (*stage.reads, *stage.awaits, *stage.reads_back), fields, f"stage {stage.name!r}")
    yield from _unknown("stage", (plan.source, *plan.pool, *([plan.gate.stage] if plan.gate else [])), stages, "it")


def _unknown(kind: str, named: tuple[str, ...], known: list[str] | set[str], where: str) -> Iterator[str]:
    yield from (f"{where} names the {kind} {name!r}, which it does not have" for name in named if name not in known)
