"""How long tasks take in virtual time: from distributions or from a recorded run. Knows no clock and no scheduler.

    times = Durations({"rollout": Drawn(parse("lognormal(1.0, 0.8)")), "train": Drawn(parse("0.2 @ 2"))})
    times.stages["train"].work(task, samples=512, tokens=0, seed=0)

A task waits and then computes; only computing is slowed down by concurrent work. All random numbers are functions of
(seed, stage, group or step, attempt), so a group takes equally long under every schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol
from zlib import crc32

import msgspec

from pipeline.declare.task import Task
from pipeline.simulation.distributions import Distribution, uniform

MOSTLY_COMPUTES = 0.5  # mean cores kept busy by a task; below, it mostly waits for a GPU or another process
GOLDEN = (5**0.5 - 1) / 2
TOKENS_PER_S = 100.0  # converts drawn seconds into a response length, which counts of dropped tokens need


class Work(NamedTuple):
    """A task on each of its workers: it waits `wait_s`, then computes on `cores` cores, which takes `work_s` alone."""

    wait_s: float
    work_s: float
    cores: float


class StreamPart(NamedTuple):
    """Groups of a stream, by position in its task: they finish `wait_s` after `work_s` of its computing."""

    work_s: float
    wait_s: float
    positions: tuple[int, ...]


class StreamWork(NamedTuple):
    """A stream's parts in ascending `work_s`, and the `tokens` of each group by position, 0 if unknown. It computes in
    `rounds`, and before each it waits an equal part of `away_s`, for nobody on its worker."""

    parts: list[StreamPart]
    cores: float
    tokens: tuple[int, ...]
    away_s: float = 0.0
    rounds: int = 1


class StageTimes(Protocol):
    """The durations of one stage."""

    def work(self, task: Task, *, samples: int, tokens: int, seed: int) -> Work:
        """Return the work of a map or a transfer, for these numbers of samples and tokens per worker."""

    def stream(self, task: Task, *, group_size: int, seed: int) -> StreamWork:
        """Return the work of a stream on the groups of `task`."""

    def faster(self, factor: float) -> StageTimes:
        """Return a copy with all durations divided by `factor`."""


class Drawn(msgspec.Struct, frozen=True):
    """Durations drawn from a distribution and divided by `speed`."""

    distribution: Distribution
    speed: float = 1.0
    tokens_per_s: float = TOKENS_PER_S

    def work(self, task: Task, *, samples: int, tokens: int, seed: int) -> Work:
        counters = _counters(task)
        took_s = self.distribution.draw(groups=len(task.groups), samples=samples, seed=seed, counters=counters)
        cores = self.distribution.cores
        return Work(0.0, took_s / self.speed, cores) if cores else Work(took_s / self.speed, 0.0, 0.0)

    def stream(self, task: Task, *, group_size: int, seed: int) -> StreamWork:
        name, groups, draw = crc32(task.stage.encode()), len(task.groups), self.distribution.draw
        samples, speed, cores = groups * group_size, self.speed, self.distribution.cores
        came_s = [
            draw(groups=groups, samples=samples, seed=seed, counters=(name, group, task.attempt)) / speed
            for group in task.groups
        ]
        tokens = tuple(max(1, round(at_s * speed * self.tokens_per_s)) for at_s in came_s)
        if cores:
            return StreamWork(merged([StreamPart(at_s, 0.0, (i,)) for i, at_s in enumerate(came_s)]), cores, tokens)
        return StreamWork(merged([StreamPart(0.0, at_s, (i,)) for i, at_s in enumerate(came_s)]), cores, tokens)

    def faster(self, factor: float) -> Drawn:
        return msgspec.structs.replace(self, speed=self.speed * factor)


class LinearFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fit of durations as fixed + per sample + per token, none of them negative, and the residuals of single tasks.

    `ratios` are measured seconds over fitted seconds, ascending. `cores` is CPU seconds over seconds.
    """

    fixed_s: float = 0.0
    per_sample_s: float = 0.0
    per_token_s: float = 0.0
    cores: float = 1.0
    ratios: tuple[float, ...] = (1.0,)

    def seconds(self, samples: int, tokens: int, u: float) -> float:
        """Return the duration at the quantile `u` of the measured ratios."""
        fitted_s = self.fixed_s + self.per_sample_s * samples + self.per_token_s * tokens
        return fitted_s * self.ratios[int(u * len(self.ratios))]


class Came(NamedTuple):
    """A group of a recorded stream: it finished `wait_s` after `fraction` of the computing, with `tokens` tokens a
    sample."""

    fraction: float
    wait_s: float
    tokens: int


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of a recorded run.

    `came` holds the groups of a recorded stream by admission number. These finish as recorded; any other group finishes
    like a randomly chosen one of them. `batch` is the number of groups per recorded step; `speed` divides durations.
    `processes` are those that a worker had for the environments of its episodes, 0 if they bounded nothing. Streams of
    episodes compute in `rounds`, with `away_s` seconds before them in which environments alone work.
    """

    line: LinearFit
    batch: int = 1
    came: Mapping[int, Came] = {}
    speed: float = 1.0
    processes: int = 0
    away_s: float = 0.0
    rounds: int = 1

    def work(self, task: Task, *, samples: int, tokens: int, seed: int) -> Work:
        line = self.line
        took_s = line.seconds(samples, tokens, self._quantile(task, seed)) / self.speed
        if line.cores >= MOSTLY_COMPUTES:
            return Work(0.0, took_s, line.cores)
        return Work(took_s * (1 - line.cores), took_s * line.cores, 1.0)  # one core, for a small part of the time

    def stream(self, task: Task, *, group_size: int, seed: int) -> StreamWork:
        name, pool = crc32(task.stage.encode()), self.pool
        came = [
            self.came.get(group) or pool[int(uniform(seed, name, group) * len(pool))] if pool else Came(1.0, 0.0, 0)
            for group in task.groups
        ]
        tokens = sum(one.tokens for one in came) * group_size
        work = self.work(task, samples=len(came) * group_size, tokens=tokens, seed=seed)
        total_s = work.wait_s + work.work_s
        cores = self.line.cores
        parts = [StreamPart(one.fraction * total_s, one.wait_s / self.speed, (i,)) for i, one in enumerate(came)]
        lengths = tuple(one.tokens for one in came)
        return StreamWork(merged(parts), cores, lengths, self.away_s / self.speed, self.rounds)

    def faster(self, factor: float) -> Recorded:
        return msgspec.structs.replace(self, speed=self.speed * factor)

    def _quantile(self, task: Task, seed: int) -> float:
        """Return a quantile in (0, 1). It advances by the golden ratio per step, so that a few steps already cover the
        measured ratios evenly; tasks of one step are independent."""
        place = task.groups[0] % self.batch if task.groups else 0
        return (uniform(seed, crc32(task.stage.encode()), place, task.attempt) + GOLDEN * task.step) % 1.0

    @property
    def pool(self) -> tuple[Came, ...]:
        """The recorded groups."""
        return tuple(self.came.values())


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Overheads between tasks, in seconds.

    dispatch_s     from submitting a task to its start on the worker, by stage
    report_s       from the task's end on the worker until the driver receives the report, by stage
    driver_s       driver time per report; the driver handles one report at a time
    beside_cpu_s   CPU seconds of other processes (driver, data plane) per task
    checkpoint_s   duration of a checkpoint, during which the driver handles no report
    drop_rate      fraction of the groups that the gate drops
    drop_reason    the reason that it gives
    turn_s         until a worker group has the memory of GPUs that it shares, by group
    again_s        seconds in which a sampler computes a token of a running sample again after new weights, on a GPU
    room           samples that a worker's streams compute at a time, by group; no entry if it takes all
    spread         maximum extra time of a target worker in a transfer, as a fraction of the quickest worker's time
    """

    dispatch_s: Mapping[str, float] = {}
    report_s: Mapping[str, float] = {}
    driver_s: float = 0.0
    beside_cpu_s: float = 0.0
    checkpoint_s: float = 0.0
    drop_rate: float = 0.0
    drop_reason: str = "dropped"
    turn_s: Mapping[str, float] = {}
    again_s: float = 0.0
    room: Mapping[str, int] = {}
    spread: float = 0.0


class Durations(msgspec.Struct, frozen=True):
    """The durations of every stage and the overheads between tasks."""

    stages: Mapping[str, StageTimes]
    costs: Costs = Costs()


def merged(parts: list[StreamPart]) -> list[StreamPart]:
    """Sort parts by their computing time and merge those that finish at the same time."""
    together: dict[tuple[float, float], list[int]] = {}
    for part in parts:
        together.setdefault((part.work_s, part.wait_s), []).extend(part.positions)
    return [StreamPart(*key, tuple(positions)) for key, positions in sorted(together.items())]


def _counters(task: Task) -> tuple[int, int, int]:
    """Return the numbers that identify a task: stage, first group or step, attempt."""
    return crc32(task.stage.encode()), task.groups[0] if task.groups else task.step + 1, task.attempt
