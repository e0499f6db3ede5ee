"""Reports on a run: step time, utilization, staleness, drops, critical path. Pure; from trace events alone.

    report = analyse([event for _, event in trace.read(run_dir.events)], plan)
    print(report.critical_path.sentence)        # rollout-bound: 61 % of the step; train waited 4.1 s per step

Recorded and simulated runs are treated alike. For a resumed run, only the part since the last start counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import msgspec

from pipeline.analysis.critical_path import CriticalPath, critical_path
from pipeline.analysis.waits import Waits
from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.record.history import Tasks, covered_s, step_ends

LENGTH_BUCKETS = 4


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from one published version to the next, in step order.

    The first steps (`warm_up`) pay for late loading and compilation and fill the pipeline; the rest are in `seconds`.
    `last` is the number of the last one, counted from 1.
    """

    warm_up: tuple[float, ...]
    seconds: tuple[float, ...]
    last: int = 0

    @property
    def first(self) -> int:
        """The number of the first step after warm-up, counted from 1."""
        return self.last - len(self.seconds) + 1

    @property
    def averaged(self) -> str:
        """The steps of the mean and the median, in words."""
        if len(self.seconds) < 2:
            return f"step {self.last}" if self.seconds else "no step"
        return f"steps {self.first} to {self.last}"

    @property
    def mean(self) -> float:
        """Mean seconds per step after warm-up; 0 without steps."""
        return fmean(self.seconds) if self.seconds else 0.0

    @property
    def median(self) -> float:
        """Median seconds after warm-up; 0 without steps."""
        return median(self.seconds) if self.seconds else 0.0


class LengthBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by the tokens of their longest response, from `low` to `high` inclusive."""

    low: int
    high: int
    admitted: int
    dropped: int


class DroppedGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that were dropped. `share` is relative to all groups that left; `by_length` is empty if no length is
    known."""

    groups: int
    share: float
    by_reason: dict[str, int]
    by_length: tuple[LengthBucket, ...]


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Train version minus the oldest token version of a group, in versions; in tokens if the record counts them."""

    samples: dict[int, int]
    tokens: dict[int, int]

    @property
    def mean(self) -> float:
        """Mean over samples; 0 if none was trained."""
        total = sum(self.samples.values())
        return sum(age * count for age, count in self.samples.items()) / total if total else 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run.

    utilisation   by worker group: share of wall time after warm-up in which a worker has a task
    cores         mean number of cores that tasks kept busy
    """

    steps: StepSeconds
    utilisation: dict[str, float]
    cores: float
    staleness: Staleness
    dropped: DroppedGroups
    critical_path: CriticalPath


def analyse(events: Iterable[trace.TraceEvent], plan: Plan, *, warm_up: int | None = None) -> Report:
    """Return the report of a run. `warm_up` is the number of leading steps to skip; see `warm_up_steps` for None."""
    return report(plan, Tasks(events), warm_up=warm_up)


def report(plan: Plan, tasks: Tasks, *, warm_up: int | None = None, waits: Waits | None = None) -> Report:
    """Return the report of a run from its tasks."""
    steps = step_ends(tasks)
    ends = [at_s for at_s, _ in steps]
    count = len(ends) - 1
    skip = warm_up_steps(plan, count, warm_up)
    seconds = tuple(b - a for a, b in pairwise(ends))
    start_s, end_s = (ends[skip], ends[-1]) if count > 0 else (0.0, 0.0)
    return Report(
        steps=StepSeconds(warm_up=seconds[:skip], seconds=seconds[skip:], last=steps[-1][1] + 1 if count > 0 else 0),
        utilisation=utilisation(plan, tasks, start_s, end_s),
        cores=_cores(tasks, start_s, end_s),
        staleness=staleness(plan, tasks),
        dropped=drops(tasks),
        critical_path=critical_path(plan, tasks, steps[skip:], waits=waits),
    )


def warm_up_steps(plan: Plan, steps: int, wanted: int | None = None) -> int:
    """Return how many leading steps are warm-up: `wanted`, or one more than rollout may run ahead; at most half."""
    return min(plan.ahead + 1 if wanted is None else wanted, max(0, steps // 2))


def utilisation(plan: Plan, tasks: Tasks, start_s: float, end_s: float) -> dict[str, float]:
    """Return the share of the time between `start_s` and `end_s` in which a worker has a task, averaged per group."""
    spans: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for ran in tasks.ran.values():
        for span in ran:
            low, high = max(span.start_s, start_s), min(span.end_s, end_s)
            if low < high:
                spans.setdefault((span.group, span.worker), []).append((low, high))
    wall_s = end_s - start_s
    return {
        group.name: sum(covered_s(spans.get((group.name, rank), ())) for rank in range(group.workers))
        / (wall_s * group.workers)
        if wall_s > 0
        else 0.0
        for group in plan.groups
    }


def stage_seconds(tasks: Tasks, start_s: float, end_s: float, steps: int) -> dict[str, float]:
    """Return the seconds per step in which a stage had a task on its busiest worker, for `steps` between two times."""
    spans: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for ran in tasks.ran.values():
        for span in ran:
            low, high = max(span.start_s, start_s), min(span.end_s, end_s)
            if low < high:
                spans.setdefault((span.stage, span.group, span.worker), []).append((low, high))
    seconds: dict[str, float] = {}
    for (stage, _, _), found in spans.items():
        seconds[stage] = max(seconds.get(stage, 0.0), covered_s(found) / max(1, steps))
    return seconds


def _cores(tasks: Tasks, start_s: float, end_s: float) -> float:
    """Return the CPU seconds of tasks per second; tasks that are partly inside count proportionally."""
    if end_s <= start_s:
        return 0.0
    used_s = 0.0
    for ran in tasks.ran.values():
        for span in ran:
            inside_s = min(span.end_s, end_s) - max(span.start_s, start_s)
            if inside_s > 0:
                used_s += span.cpu_s * inside_s / (span.end_s - span.start_s)
    return used_s / (end_s - start_s)


def staleness(plan: Plan, tasks: Tasks) -> Staleness:
    """Return the age of trained samples."""
    samples: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for event in tasks.others:
        if isinstance(event, trace.Trained):
            lengths = _lengths(event, tasks.tokens)
            for oldest, count, length in zip(event.oldest, event.samples, lengths):
                samples[event.version - oldest] += count
                tokens[event.version - oldest] += round(length)
    return Staleness(samples=dict(sorted(samples.items())), tokens={a: n for a, n in sorted(tokens.items()) if n})


def _lengths(event: trace.Trained, tokens: Mapping[int, int]) -> list[float]:
    """Return the tokens of each group: the trained tokens, split by group lengths if known."""
    total = max(event.entries.values(), default=0)
    weights = [tokens.get(group, 0) * count for group, count in zip(event.groups, event.samples)]
    if not all(weights):
        weights = list(event.samples)
    return [total * weight / sum(weights) for weight in weights] if sum(weights) else []


def drops(tasks: Tasks) -> DroppedGroups:
    """Return the dropped groups by reason, and their lengths relative to the rest."""
    reasons: Counter[str] = Counter()
    lengths = dict(tasks.tokens)
    gone: set[int] = set()
    claimed = 0
    for event in tasks.others:
        if isinstance(event, trace.Dropped):
            reasons[event.reason] += len(event.groups)
            gone.update(event.groups)
            lengths.update((group, tokens) for group, tokens in zip(event.groups, event.tokens) if tokens)
        elif isinstance(event, trace.Claimed):
            claimed += len(event.groups)
    left = len(gone) + claimed
    return DroppedGroups(
        groups=len(gone),
        share=len(gone) / left if left else 0.0,
        by_reason=dict(reasons),
        by_length=tuple(_buckets({group: n for group, n in lengths.items() if n}, gone)),
    )


def _buckets(lengths: Mapping[int, int], gone: set[int]) -> Iterable[LengthBucket]:
    """Yield buckets of equal size, as far as ties allow."""
    ordered = sorted(lengths, key=lambda group: lengths[group])
    start = 0
    for number in range(1, LENGTH_BUCKETS + 1):
        stop = len(ordered) * number // LENGTH_BUCKETS
        while 0 < stop < len(ordered) and lengths[ordered[stop]] == lengths[ordered[stop - 1]]:
            stop += 1
        members = ordered[start:stop]
        if members:
            yield LengthBucket(
                low=lengths[members[0]],
                high=lengths[members[-1]],
                admitted=len(members),
                dropped=sum(group in gone for group in members),
            )
        start = max(start, stop)


def summary(report: Report) -> dict[str, Any]:
    """Convert a report to plain values: seconds, shares and counts."""
    return {
        "step_s": report.steps.mean,
        "step_median_s": report.steps.median,
        "warm_up_s": report.steps.warm_up,
        "averaged_steps": [report.steps.first, report.steps.last] if report.steps.seconds else [],
        "utilisation": report.utilisation,
        "busy_cores": report.cores,
        "staleness": msgspec.to_builtins(report.staleness, str_keys=True),
        "dropped": msgspec.to_builtins(report.dropped),
        "critical_path": msgspec.to_builtins(report.critical_path),
    }
