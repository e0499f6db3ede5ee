"""Checks of the schedule of a graph. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.declare.abilities import StartsOnRuns, corrects, stamped_by, stamps_of
from pipeline.declare.graph import Graph, Schedule
from pipeline.declare.parameters import at_least, broken, is_whole, one_of
from pipeline.declare.stage import Stage
from pipeline.errors import Problem, shown
from pipeline.plan.plan import Partition

MOST_STEPS = 10**12  # a typo, not a plan
_RULES = (
    at_least("steps", 1, most=MOST_STEPS, why=f"steps must be a whole number from 1 to {MOST_STEPS:,}", fix=100),
    at_least("max_staleness", 0),
    at_least("checkpoint_every", 0),
    at_least(
        "keep_checkpoints",
        2,
        why="keep_checkpoints must be a whole number, 2 or more, so that one is left if the newest is damaged, or None "
        "to keep all",
    ).optional(),
    at_least("keep_every", 0),
    at_least("keep_groups", 0),
    at_least("seed", 0, most=2**63 - 1, why="seed must be a whole number from 0 to 2**63 - 1"),
    at_least(
        "capacity",
        1,
        why="capacity must be a whole number of groups, 1 or more, or None for (max_staleness + 2) batches",
        fix="None",
    ).optional(),
    at_least(
        "capacity_bytes",
        1,
        why="capacity_bytes must be a whole number of bytes, 1 or more, or None for no limit",
        fix="None",
    ).optional(),
    at_least("pipeline_depth", 0).optional(),
    one_of("on_stale", ("wait", "drop")),
    one_of("refit", ("drain", "in_flight")),
    one_of("on_divergence", ("warn", "stop")),
)
_COUNTS = {rule.name: rule for rule in _RULES if rule.name in ("max_staleness", "capacity", "pipeline_depth")}
_KEPT = {rule.name: rule for rule in _RULES if rule.name in ("checkpoint_every", "keep_checkpoints", "keep_every")}
_RUN = at_least(
    "run_samples",
    1,
    why="run_samples is the number of samples to start on, 1 or more, or None for the whole batch",
    fix="None",
).optional()


def schedule_problems(graph: Graph) -> Iterator[Problem]:
    """Yield problems of the schedule's values and of running ahead. `pool_problems` checks the rest."""
    schedule, where = graph.schedule, str(graph.location)
    yield from broken(_RULES, schedule, where=where, says="Schedule({})")
    if all(rule.legal(getattr(schedule, name)) for name, rule in _KEPT.items()):
        yield from _keep_problems(schedule, where)
    if not all(rule.legal(getattr(schedule, name)) for name, rule in _COUNTS.items()):
        return
    depth = schedule.pipeline_depth
    if depth is not None and depth > schedule.max_staleness:
        yield Problem(
            where=where,
            what=f"Schedule(pipeline_depth={depth}, max_staleness={schedule.max_staleness})",
            why="samples from further ahead would be too old to be trained",
            fix=f"max_staleness={depth}, or a smaller pipeline_depth",
        )
    if schedule.max_staleness > 0 and not any(map(corrects, graph.stages)):
        yield Problem(
            where=where,
            what=f"Schedule(max_staleness={schedule.max_staleness}) and no stage corrects for it",
            why="samples of an older policy bias the gradient",
            fix="max_staleness=0, or a loss with an off-policy correction",
        )
    needed = (schedule.max_staleness + 1) * graph.batch
    if schedule.capacity is not None and schedule.capacity < needed:
        yield Problem(
            where=where,
            what=f"Schedule(capacity={schedule.capacity})",
            why=f"(max_staleness + 1) x batch = {needed} groups are in flight at once",
            fix=f"capacity={needed} or more",
        )
    if schedule.on_stale == "drop" and schedule.max_staleness > 0:
        yield from _versions_problems(graph)


def _keep_problems(schedule: Schedule, where: str) -> Iterator[Problem]:
    """Yield the problems of a `keep_every` whose checkpoints stay without it, or are never written."""
    every, step = schedule.keep_every, schedule.checkpoint_every
    if every and schedule.keep_checkpoints is None:
        yield Problem(
            where=where,
            what=f"Schedule(keep_every={every}) and keep_checkpoints=None",
            why="no checkpoint is removed, so keep_every has no effect",
            fix="keep_checkpoints=3, or leave out keep_every",
        )
    if every and (not step or every % step):
        yield Problem(
            where=where,
            what=f"Schedule(checkpoint_every={step}, keep_every={every})",
            why="keep_every selects among the checkpoints that checkpoint_every writes",
            fix=f"keep_every={-(-every // step) * step}" if step else f"checkpoint_every={every}",
        )


def _versions_problems(graph: Graph) -> Iterator[Problem]:
    """Yield what is missing for dropping samples by age: published versions, and tokens stamped with them."""
    stages = graph.all_stages()
    lacks = [
        (any(stage.shape == "transfer" for stage in stages), "no stage publishes weights", "Refit(policy, ...)"),
        (stamps_of(stages), "no stage writes which version sampled each token", "a Rollout"),
    ]
    for there, what, fix in lacks:
        if not there:
            yield Problem(
                where=str(graph.location),
                what=f"Schedule(on_stale='drop') and {what}",
                why="samples are dropped by the age of their oldest token",
                fix=f"add {fix}, or on_stale='wait'",
            )


def timing_problems(stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yield problems of what stages declare about runs and versions."""
    for stage in stages:
        where, stamps = str(stage.location), stamped_by(stage)
        fits = stamps in stage.writes and stamps.ragged and stamps.dtype.startswith("int") if stamps else True
        if not fits:
            yield Problem(
                where=where,
                what=f"stage {stage.name!r} stamps {shown(stamps.name if stamps else stamps)}",
                why="stamps must name a field that the stage writes, with each token's policy version",
                fix='Field("token_versions", dtype="int32", dims="N T") among writes, or no stamps',
            )
        if stage.shape == "transfer" and is_whole(stage.every, 2):
            yield Problem(
                where=where,
                what=f"stage {stage.name!r} publishes weights only every {stage.every} steps",
                why="every step makes one version, and a later batch waits for it",
                fix="every=1",
            )
        if stage.shape == "stream" and stage.per == "batch":
            yield Problem(
                where=where,
                what=f"stage {stage.name!r} streams, and has per='batch'",
                why="a stream yields groups as they finish",
                fix="per='group'",
            )
        if isinstance(stage, StartsOnRuns):
            yield from broken([_RUN], stage, where=where, says=f"stage {stage.name!r} has {{}}")


def capacity_problems(graph: Graph, partitions: Sequence[Partition]) -> Iterator[Problem]:
    """Warn if the bytes that are allowed do not hold one batch."""
    allowed = graph.schedule.capacity_bytes
    needed = graph.batch * sum(partition.most_bytes for partition in partitions)
    if allowed is not None and needed > allowed:
        yield Problem(
            where=str(graph.location),
            what=f"Schedule(capacity_bytes={allowed})",
            why=f"one batch may take {needed} bytes, texts and prompts not counted, so only one is in flight at a time",
            fix=f"capacity_bytes={(graph.schedule.max_staleness + 2) * needed}",
            warning=True,
        )


def pool_problems(graph: Graph, pool: Sequence[str]) -> Iterator[Problem]:
    """Yield stages that have to run before a batch is claimed and cannot: those that sample, and the gate."""
    schedule = graph.schedule
    if schedule.on_stale != "drop" or not schedule.max_staleness:
        return
    for stage in graph.all_stages():
        if (stage.gate or stamped_by(stage)) and stage.name not in pool:
            yield Problem(
                where=str(stage.location),
                what=f"Schedule(on_stale='drop') and {stage.name!r} needs the whole batch, or weights of its step",
                why="with on_stale='drop' a batch is claimed from groups that have been sampled and kept",
                fix="use stages up to this one that take groups one by one, or on_stale='wait'",
            )
