"""Changes to a run before it is simulated: schedule, batch, workers, stage durations. Pure.

    change = Changes(max_staleness=2, on_stale="drop", groups="8x", workers={"sampler": 4}, speed={"train": 2.0})
    plan, durations = change.applied(plan, durations)

Raises GraphError with every change that does not apply to the plan.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from pipeline.errors import GraphError, Problem
from pipeline.plan.plan import ADDED, Plan, PlannedStage
from pipeline.plan.pool import with_pool
from pipeline.simulation.distributions import GRAMMAR, MOST_S, Distribution, Term, parse
from pipeline.simulation.durations import Drawn, Durations, LinearFit, Recorded, StageTimes

MOST_STEPS = 100_000  # of a simulation
MOST_BATCH = 1_000_000  # groups per step
MOST_GROUPS = 10_000_000  # over all steps
MOST_FACTOR = 1_000_000  # by which a stage is faster or slower


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to apply. None or empty keeps the recorded value.

    groups        groups per batch: a number, or a factor ("8x")
    refit_s       seconds per refit
    workers       number of workers, by worker group
    environments  environment processes per worker, by stage of episodes; the recording is fitted with them
    speed         factor by which to speed up a stage, by stage
    stages        distributions that replace recorded durations, by stage
    """

    steps: int | None = None
    max_staleness: int | None = None
    pipeline_depth: int | None = None
    on_stale: Literal["wait", "drop"] | None = None
    refit: Literal["drain", "in_flight"] | None = None
    groups: str | None = None
    refit_s: float | None = None
    workers: Mapping[str, int] = {}
    environments: Mapping[str, int] = {}
    speed: Mapping[str, float] = {}
    stages: Mapping[str, str] = {}

    def __bool__(self) -> bool:
        return any(getattr(self, name) not in (None, {}) for name in self.__struct_fields__)

    def applied(self, plan: Plan, durations: Durations) -> tuple[Plan, Durations]:
        """Return the changed plan and durations. Raises GraphError if a change does not apply."""
        self.check(plan, durations)
        return self._plan(plan), self._durations(plan, durations)

    def check(self, plan: Plan, durations: Durations) -> None:
        """Raise GraphError if a change does not apply."""
        if problems := list(self._problems(plan, durations)):
            raise GraphError(*problems)

    def _plan(self, plan: Plan) -> Plan:
        batch = _batch(self.groups, plan.batch)
        bound = plan.max_staleness if self.max_staleness is None else self.max_staleness
        depth = self.pipeline_depth
        if depth is None:
            depth = plan.ahead if plan.ahead < plan.max_staleness else bound
        usual = (plan.max_staleness + 2) * plan.batch
        least = (bound + 2) * batch if plan.capacity >= usual else (bound + 1) * batch
        changed = replace(
            plan,
            batch=batch,
            steps=plan.steps if self.steps is None else self.steps,
            max_staleness=bound,
            ahead=min(depth, bound),
            on_stale=self.on_stale or plan.on_stale,
            refit=self.refit or plan.refit,
            capacity=max(least, plan.capacity * batch // plan.batch),
            gate=replace(plan.gate, max_groups=plan.gate.max_groups // plan.batch * batch) if plan.gate else None,
            groups=tuple(replace(group, workers=self.workers.get(group.name, group.workers)) for group in plan.groups),
        )
        return with_pool(changed)

    def _durations(self, plan: Plan, durations: Durations) -> Durations:
        stages = {ADDED: Drawn(parse("0"))} | dict(
            durations.stages
        )  # ADDED is not the user's stage, so no flag would set its duration
        stages.update({name: Drawn(parse(text)) for name, text in self.stages.items()})
        if self.refit_s is not None:
            for stage in plan.stages:
                if stage.shape == "transfer":
                    stages[stage.name] = _of_seconds(stages.get(stage.name), self.refit_s)
        for name, factor in self.speed.items():
            stages[name] = stages[name].faster(factor)
        return Durations(stages, durations.costs)

    def _problems(self, plan: Plan, durations: Durations) -> Iterator[Problem]:
        yield from range_problems(self)
        yield from _size_problems(plan.steps if self.steps is None else self.steps, _batch(self.groups, plan.batch))
        stages = [stage.name for stage in plan.stages]
        for name in (*self.stages, *self.speed):
            if name not in stages:
                yield _unknown("--speed" if name in self.speed else "--stage", "stage", name, stages)
        for name, text in self.stages.items():
            if problem := distribution_problem(name, text):
                yield problem
        groups = {group.name: group for group in plan.groups}
        for name, workers in self.workers.items():
            if name not in groups:
                yield _unknown("--workers", "worker group", name, list(groups))
            elif workers < 1 or workers % groups[name].model_parallel:
                width = groups[name].model_parallel
                yield Problem(
                    where=f"--workers {name}={workers}",
                    what=f"worker group {name!r} cannot have {workers} workers",
                    why="it has one or more" if width == 1 else f"each copy of a model spans {width} of them",
                    fix=f"--workers {name}={max(1, workers // width) * width}",
                )
        for name, processes in self.environments.items():
            if name not in stages:
                yield _unknown("--environments", "stage", name, stages)
            elif problem := _environment_problem(name, processes, durations.stages.get(name)):
                yield problem
        if self.max_staleness and (turned := [group for group in plan.groups if group.colocated]):
            yield Problem(
                where=f"--max-staleness {self.max_staleness}",
                what=f"worker group {turned[0].name!r} shares the GPUs of {turned[0].colocated!r}",
                why="groups that take turns on the same GPUs cannot run ahead",
                fix="--max-staleness 0",
            )
        if self.refit_s is not None and not any(stage.shape == "transfer" for stage in plan.stages):
            yield Problem(
                where="--refit-s",
                what=f"{plan.name} has no Refit",
                why="this flag sets the seconds per Refit",
                fix="leave it out",
            )
        unknown = [stage.name for stage in plan.stages if not self._is_known(stage, durations)]
        if unknown:
            yield Problem(
                where=plan.name,
                what=f"the durations of {', '.join(unknown)} are unknown"
                if unknown[1:]
                else f"the duration of {unknown[0]} is unknown",
                why="every stage needs recorded durations or a distribution",
                fix=" ".join(f'--stage "{name}=0.1"' for name in unknown),
            )

    def _is_known(self, stage: PlannedStage, durations: Durations) -> bool:
        refit = self.refit_s is not None and stage.shape == "transfer"
        return refit or stage.name in durations.stages or stage.name in self.stages or stage.name == ADDED


def range_problems(change: Changes) -> Iterator[Problem]:
    """Yield the problems of numbers that are out of range for every plan."""
    lows = {"steps": 1, "max_staleness": 0, "pipeline_depth": 0}
    for name, low in lows.items():
        value = getattr(change, name)
        if value is not None and value < low:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                where=f"{flag} {value}", what="it is too small", why=f"it must be {low} or more", fix=f"{flag} {low}"
            )
    for name, factor in change.speed.items():
        if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
            yield Problem(
                where=f"--speed {name}={factor:g}x",
                what="it is not a factor",
                why=f"a stage runs that many times as fast, from {1 / MOST_FACTOR:f} to {MOST_FACTOR:,} times",
                fix=f"--speed {name}=2x",
            )
    if change.refit_s is not None and not 0 <= change.refit_s <= MOST_S:
        yield Problem(
            where=f"--refit-s {change.refit_s:g}",
            what="it is not a time",
            why=f"it must be 0 to {MOST_S:,} seconds",
            fix="--refit-s 0.1",
        )
    if change.groups is not None and _batch(change.groups, 1) < 1:
        yield Problem(
            where=f"--groups {change.groups}",
            what="it is neither a number of groups nor a factor",
            why="it sets the groups per batch, or multiplies those of the run",
            fix="--groups 64, or --groups 8x",
        )


def _size_problems(steps: int, batch: int) -> Iterator[Problem]:
    """Yield a problem if a simulation would take hours or more memory than a machine has."""
    if steps > MOST_STEPS or batch > MOST_BATCH or steps * batch > MOST_GROUPS:
        large = batch > MOST_BATCH
        yield Problem(
            where="--groups" if large else "--steps",
            what=f"the simulation has {steps:,} steps of {batch:,} groups",
            why=f"the most are {MOST_STEPS:,} steps, {MOST_BATCH:,} groups per step, and {MOST_GROUPS:,} in all",
            fix="--groups 64" if large else f"--steps {min(1000, MOST_GROUPS // max(batch, 1))}",
        )


def distribution_problem(name: str, text: str) -> Problem | None:
    """Return the problem with the distribution of a stage; None if it is valid."""
    try:
        parse(text)
    except ValueError as error:
        return Problem(
            where=f"--stage {name}={text}",
            what=str(error),
            why="a duration is a sum of seconds and distributions",
            fix=f'--stage "{name}={GRAMMAR}"',
        )
    return None


def _environment_problem(name: str, processes: int, times: StageTimes | None) -> Problem | None:
    """Return why a stage cannot be simulated with that many environment processes; None if it can."""
    now = times.processes if isinstance(times, Recorded) else 0
    if now and processes >= 1:
        return None
    return Problem(
        where=f"--environments {name}={processes}",
        what="it is too small" if now else f"no calls of {name!r} that wait for a process are recorded",
        why="it must be 1 or more" if now else "only the record of episodes without coroutines says how long they wait",
        fix=f"--environments {name}={2 * now}" if now else "leave it out",
    )


def _batch(text: str | None, batch: int) -> int:
    """Return the number of groups per batch; 0 if the text is not valid."""
    if text is None:
        return batch
    factor = re.fullmatch(r"(\d+(?:\.\d+)?)x", text)
    if factor:
        return (
            round(float(factor[1]) * batch) if batch > 1 or float(factor[1]) == 0 else max(1, round(float(factor[1])))
        )
    return int(text) if re.fullmatch(r"\d{1,9}", text) else 0


def _of_seconds(times: StageTimes | None, seconds: float) -> StageTimes:
    if isinstance(times, Recorded):
        return replace(times, line=LinearFit(fixed_s=seconds, cores=times.line.cores), speed=1.0)
    return Drawn(Distribution(terms=(Term("constant", (seconds,)),)))


def _unknown(flag: str, kind: str, name: str, known: Iterable[str]) -> Problem:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return Problem(
        where=f"{flag} {name}=...",
        what=f"there is no {kind} {name!r}",
        why=f"the {kind}s are {', '.join(names)}",
        fix=f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}",
    )
