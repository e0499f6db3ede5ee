"""The least time that a step can take, from the durations of its stages: what a simulation is not needed for.

least_s(planned, made.recording.durations)  # seconds; 0 where nothing is known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pipeline.declare.task import Task
from pipeline.foretell.forecast import ForetoldTimes
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.simulation.durations import Durations

OTHER_ORDER = 0.995  # of its time, that a batch takes at least if its groups come in another order


def least_s(planned: Plan, durations: Durations) -> float:
    """Return the seconds of a step on its longest path from stage to stage. Steps that overlap share all but what
    follows the weights: training and sending them. A stage that works on parts of a batch, or whose durations are
    drawn, counts as 0."""
    overlaps = planned.ahead > 0 or planned.max_staleness > 0
    paths: dict[str, tuple[float, tuple[PlannedStage, ...]]] = {}
    for stage in sorted(planned.stages, key=lambda stage: stage.layer):
        before = [paths[edge.writer] for edge in planned.edges if edge.reader == stage.name and not edge.back]
        starts = overlaps and stage.updates is not None
        so_far_s, path = (0.0, ()) if starts else max(before, key=lambda one: one[0], default=(0.0, ()))
        counts = not overlaps or starts or bool(path)
        own_s = _seconds(stage, planned, durations) if counts else 0.0
        paths[stage.name] = (so_far_s + own_s, (*path, stage) if counts else ())
    longest_s, path = max(paths.values(), key=lambda one: one[0], default=(0.0, ()))
    turns_s = 0.0 if overlaps else _turns_s(path, planned, durations.costs.turn_s)
    return OTHER_ORDER * longest_s + turns_s


def _seconds(stage: PlannedStage, planned: Plan, durations: Durations) -> float:
    """Return the seconds of a stage on a whole batch."""
    times = durations.stages.get(stage.name)
    if not isinstance(times, ForetoldTimes) or stage.every > 1 or stage.run_groups:
        return 0.0
    groups = tuple(range(planned.batch))
    if stage.shape == "stream":
        parts = next(group.replicas for group in planned.groups if group.name == stage.groups[0])
        edges = [len(groups) * i // parts for i in range(parts + 1)]  # as the scheduler divides them
        tasks = [Task(stage=stage.name, step=0, groups=groups[a:b]) for a, b in pairwise(edges) if a < b]
        return max(times.stream(task, group_size=planned.group_size, seed=0).parts[-1].work_s for task in tasks)
    if stage.shape == "transfer" or (stage.shape == "map" and stage.per == "batch"):
        whole = stage.shape == "transfer" or stage.sharding is not None
        task = Task(stage=stage.name, step=0, groups=groups, replica=None if whole else 0)
        return times.work(task, samples=0, tokens=0, seed=0).work_s
    return 0.0


def _turns_s(path: Sequence[PlannedStage], planned: Plan, turn_s: Mapping[str, float]) -> float:
    """Return the seconds in which groups on the same GPUs take turns, if only stages of the path do."""
    homes = {group.name: group.colocated or group.name for group in planned.groups}
    computing = [stage for stage in planned.stages if turn_s.get(stage.groups[-1]) and (stage.uses or stage.updates)]
    if len({homes[stage.groups[-1]] for stage in computing}) != 1 or not all(stage in path for stage in computing):
        return 0.0
    order = [stage.groups[-1] for stage in path if stage in computing]
    return sum(turn_s[now] for before, now in zip([order[-1], *order], order) if before != now)
