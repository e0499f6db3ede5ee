"""What a record says of a run: step time, utilisation, staleness, drops, critical path. Pure; from trace events alone.

    report = analyse([event for _, event in trace.read(run_dir.events)], plan)
    print(report.critical_path.sentence)        # rollout-bound: 61 % of the step; train waited 4.1 s a step

A recorded run and a simulated one are read alike. Of a run that was resumed, the part since the last start is read.
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
    """Seconds from one published version to the next, in the order of the steps.

    The first ones (`warm_up`) pay for what is loaded and compiled late, and fill what is in flight; the others are in
    `seconds`.
    """

    warm_up: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Seconds a step behind the warm-up; 0 where there is none."""
        return fmean(self.seconds) if self.seconds else 0.0

    @property
    def median(self) -> float:
        """Of the seconds behind the warm-up; 0 where there is none."""
        return median(self.seconds) if self.seconds else 0.0


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by the tokens of their longest response: from `low` up to `high`, both included."""

    low: int
    high: int
    admitted: int
    dropped: int


class Drops(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that left without being trained. `share` is of all that left; `by_length` is empty where no length is
    known."""

    groups: int
    share: float
    by_reason: dict[str, int]
    by_length: tuple[Bucket, ...]


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Train version minus the oldest version of a group's tokens, in versions. Tokens where the record counts them."""

    samples: dict[int, int]
    tokens: dict[int, int]

    @property
    def mean(self) -> float:
        """Over samples; 0 where none was trained."""
        total = sum(self.samples.values())
        return sum(age * count for age, count in self.samples.items()) / total if total else 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a record says of a run.

    utilisation   share of the wall time behind the warm-up in which a worker of the group has a task, by worker group
    cores         cores that all tasks kept busy in the mean
    """

    steps: StepSeconds
    utilisation: dict[str, float]
    cores: float
    staleness: Staleness
    dropped: Drops
    critical_path: CriticalPath


def analyse(events: Iterable[trace.TraceEvent], plan: Plan, *, warm_up: int | None = None) -> Report:
    """The report of a run. `warm_up` is how many first steps are left out; None is max_staleness + 1, half at most."""
    return report(plan, Tasks(events), warm_up=warm_up)


def report(plan: Plan, tasks: Tasks, *, warm_up: int | None = None, waits: Waits | None = None) -> Report:
    """The report of a run whose tasks were read."""
    steps = step_ends(tasks)
    ends = [at_s for at_s, _ in steps]
    count = len(ends) - 1
    skip = warm_up_steps(plan, count, warm_up)
    seconds = tuple(b - a for a, b in pairwise(ends))
    start_s, end_s = (ends[skip], ends[-1]) if count > 0 else (0.0, 0.0)
    return Report(
        steps=StepSeconds(warm_up=seconds[:skip], seconds=seconds[skip:]),
        utilisation=utilisation(plan, tasks, start_s, end_s),
        cores=_cores(tasks, start_s, end_s),
        staleness=staleness(plan, tasks),
        dropped=drops(tasks),
        critical_path=critical_path(plan, tasks, steps[skip:], waits=waits),
    )


def warm_up_steps(plan: Plan, steps: int, wanted: int | None = None) -> int:
    """How many of so many steps are the first ones, which are not like the others: `wanted`, or one more than rollout
    is ahead; half at most."""
    return min(plan.ahead + 1 if wanted is None else wanted, max(0, steps // 2))


def utilisation(plan: Plan, tasks: Tasks, start_s: float, end_s: float) -> dict[str, float]:
    """Share of the time from `start_s` to `end_s` in which a worker has at least one task: the mean over each group."""
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
    """Seconds a step in which a stage had a task, by stage, on that of its workers which had the most; of `steps`
    between two times."""
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
    """CPU seconds of tasks a second; those of a task that is only partly inside count in proportion."""
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
    """How old what was trained was."""
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
    """Tokens of each group: what was trained on, divided by the lengths of the groups where they are known."""
    total = max(event.entries.values(), default=0)
    weights = [tokens.get(group, 0) * count for group, count in zip(event.groups, event.samples)]
    if not all(weights):
        weights = list(event.samples)
    return [total * weight / sum(weights) for weight in weights] if sum(weights) else []


def drops(tasks: Tasks) -> Drops:
    """What left without being trained, why, and how long it was beside the others."""
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
    return Drops(
        groups=len(gone),
        share=len(gone) / left if left else 0.0,
        by_reason=dict(reasons),
        by_length=tuple(_buckets({group: n for group, n in lengths.items() if n}, gone)),
    )


def _buckets(lengths: Mapping[int, int], gone: set[int]) -> Iterable[Bucket]:
    """As many groups in each as ties allow."""
    ordered = sorted(lengths, key=lambda group: lengths[group])
    start = 0
    for number in range(1, LENGTH_BUCKETS + 1):
        stop = len(ordered) * number // LENGTH_BUCKETS
        while 0 < stop < len(ordered) and lengths[ordered[stop]] == lengths[ordered[stop - 1]]:
            stop += 1
        members = ordered[start:stop]
        if members:
            yield Bucket(
                low=lengths[members[0]],
                high=lengths[members[-1]],
                admitted=len(members),
                dropped=sum(group in gone for group in members),
            )
        start = max(start, stop)


def summary(report: Report) -> dict[str, Any]:
    """A report as plain values: seconds, shares and counts."""
    return {
        "step_s": report.steps.mean,
        "step_median_s": report.steps.median,
        "warm_up_s": report.steps.warm_up,
        "utilisation": report.utilisation,
        "busy_cores": report.cores,
        "staleness": msgspec.to_builtins(report.staleness, str_keys=True),
        "dropped": msgspec.to_builtins(report.dropped),
        "critical_path": msgspec.to_builtins(report.critical_path),
    }
