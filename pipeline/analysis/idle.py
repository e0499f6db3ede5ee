"""Sums idle seconds of workers and worker groups by cause. Pure.

idle = idle_by_worker(workers(plan, tasks), gaps(plan, tasks, start_s, end_s), end_s - start_s)
idle[0].parts[0]                     # IdlePart(cause="field", stage="reward", field="reward", seconds=4.1)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from pipeline.analysis.gaps import Gap, Worker


class IdlePart(msgspec.Struct, frozen=True, kw_only=True):
    """Idle seconds with one cause, for one stage and one field."""

    cause: str
    stage: str
    field: str
    seconds: float


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Idle seconds of a worker, or the mean over a group's workers (`worker` is None), out of `wall_s`. The parts add
    up to `idle_s`, largest first."""

    group: str
    worker: int | None
    wall_s: float
    idle_s: float
    parts: tuple[IdlePart, ...]


def idle_by_worker(workers: Iterable[Worker], found: Iterable[Gap], wall_s: float) -> list[Idle]:
    """Return the sums of every worker. `found` holds their gaps within `wall_s`."""
    sums: dict[Worker, dict[tuple[str, str, str], float]] = {worker: {} for worker in workers}
    for gap in found:
        key = (gap.cause, gap.stage, gap.field)
        own = sums[gap.group, gap.worker]
        own[key] = own.get(key, 0.0) + gap.end_s - gap.start_s
    return [_idle(group, rank, own, wall_s) for (group, rank), own in sums.items()]


def idle_by_group(found: Sequence[Idle]) -> list[Idle]:
    """Return the means over the workers of each group."""
    members: dict[str, list[Idle]] = defaultdict(list)
    for one in found:
        members[one.group].append(one)
    whole = []
    for group, idle in members.items():
        sums: dict[tuple[str, str, str], float] = defaultdict(float)
        for one in idle:
            for part in one.parts:
                sums[part.cause, part.stage, part.field] += part.seconds / len(idle)
        whole.append(_idle(group, None, sums, idle[0].wall_s))
    return whole


def _idle(group: str, worker: int | None, sums: dict[tuple[str, str, str], float], wall_s: float) -> Idle:
    parts = [
        IdlePart(cause=cause, stage=stage, field=field, seconds=seconds)
        for (cause, stage, field), seconds in sorted(sums.items(), key=lambda item: -item[1])
    ]
    return Idle(group=group, worker=worker, wall_s=wall_s, idle_s=sum(sums.values()), parts=tuple(parts))
