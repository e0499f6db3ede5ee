"""The pool of a plan: what runs on groups before a batch is claimed. Pure, and does not need networkx."""

from __future__ import annotations

from msgspec.structs import replace

from pipeline.plan.plan import Plan


def with_pool(made: Plan) -> Plan:
    """Return the plan with its pool: the stages that need to know neither the batch nor the step of a group.

    Without one, batches are fixed at admission: so it is in a plan that waits for slow groups and has no gate, or whose
    gate cannot decide before a batch is known.
    """
    if not made.drops_stale and not (made.gate and made.ahead):
        return replace(made, pool=())
    bound = {name for fence in made.fences for name in (fence.before, fence.after)}
    external = {stage.name for stage in made.stages if stage.shape == "external"}
    writer = {field: stage.name for stage in made.stages for field in stage.writes}
    weights = set(made.weights_fields)
    pool: set[str] = set()
    for stage in sorted(made.stages, key=lambda stage: stage.layer):
        free = stage.per != "batch" and stage.every == 1 and stage.shape not in ("transfer", "external")
        before = {writer[field] for field in (*stage.reads, *stage.awaits)} - external
        apart = stage.name not in bound and weights.isdisjoint((*stage.reads, *stage.writes))
        if free and apart and before <= pool:
            pool.add(stage.name)
    needed = {stage.name for stage in made.stages if stage.stamps} | ({made.gate.stage} if made.gate else set())
    if not made.drops_stale and not needed <= pool:
        return replace(made, pool=())
    return replace(made, pool=tuple(stage.name for stage in made.stages if stage.name in pool))
