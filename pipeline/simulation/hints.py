"""Finds changes that would make a recorded run faster: simulates small changes for a few steps each, best first.

    found = hints(recording_of(run), run.path)
    found.hints[0]          # Hint(text="train twice as fast", times=1.31, command="python -m pipeline.simulate ...")

Each hint's command prints the hint's number; the command `base` simulates the unchanged run. The number of simulated
steps depends only on the tasks per step, so the same record always yields the same hints (if it lacks the number of
cores, on the same machine).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pipeline.analysis.report import Report, analyse
from pipeline.declare.group import HOST
from pipeline.errors import SluiceError
from pipeline.plan.plan import ADDED, PlacedGroup, Plan
from pipeline.precedence import typed
from pipeline.record.history import Tasks
from pipeline.simulation.durations import Recorded
from pipeline.simulation.episodes import enough_processes
from pipeline.simulation.recording import Recording, disagreement, simulated
from pipeline.simulation.whatif import Changes

TASKS = 10_000  # approximate number of tasks simulated over all changes
STEPS = (4, 12)  # minimum and maximum number of steps simulated per change
STAGES = 3  # maximum number of critical-path stages to try to speed up
SHARE = 0.05  # minimum share of the critical path that such a stage takes
GAIN = 0.01  # minimum gain of a hint, as a fraction


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """One change. A step would take `step_s` seconds and be `times` times as fast. `flags` are flags of
    `pipeline.simulate`; `command` is the whole command line, which prints the same `step_s`."""

    text: str
    times: float
    step_s: float
    flags: tuple[str, ...]
    command: str


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per step, `measured_s` in the run and `simulated_s` in its unchanged simulation (the command `base`).
    `hints` is empty if no change gains enough, nothing can be simulated, or the unchanged simulation is too far from
    the run; `notes` has the reasons. `steps` are those that the two means are of."""

    measured_s: float
    simulated_s: float
    base: str
    hints: tuple[Hint, ...]
    notes: tuple[str, ...]
    steps: tuple[str, str] = ("", "")


def hints(recording: Recording, run: Path, *, measured: Report | None = None) -> Hints:
    """Return the hints for a recorded run. `run` is its directory as written in the commands; `measured` is its report,
    if already computed."""
    planned = recording.plan
    measured = measured or analyse(recording.events, planned)
    steps, notes = _steps(recording), list(recording.notes)
    absent = [stage.name for stage in planned.stages if stage.name not in {*recording.durations.stages, ADDED}]
    common = ["--steps", str(steps), *(part for name in absent for part in ("--stage", f"{name}=0"))]
    if absent:
        notes.append(f"{', '.join(absent)} has not run yet: assumed to take no time")
    base = Changes(steps=steps, stages=dict.fromkeys(absent, "0"))
    unchanged = simulated(recording, base)[1]
    as_it_was, off = unchanged.steps.mean, disagreement(unchanged, measured)
    if off:
        notes.insert(0, f"warning: {off}, so there are no hints")
    found = []
    for text, flags, change in () if off else _changes(recording, measured):
        try:
            step_s = simulated(recording, msgspec.structs.replace(change, steps=steps, stages=base.stages))[
                1
            ].steps.mean
        except SluiceError:  # the change does not apply to this run, or the run cannot finish with it
            continue
        if step_s and as_it_was / step_s >= 1 + GAIN:
            command = _command(run, [*common, *flags])
            found.append(Hint(text=text, times=as_it_was / step_s, step_s=step_s, flags=flags, command=command))
    return Hints(
        measured_s=measured.steps.mean,
        simulated_s=as_it_was,
        base=_command(run, common),
        hints=tuple(sorted(_worth(found), key=lambda hint: -hint.times)),
        notes=tuple(notes),
        steps=(measured.steps.averaged, unchanged.steps.averaged),
    )


def _worth(found: list[Hint]) -> Iterator[Hint]:
    """Yield the hints except those that extend another hint's flags without gaining more."""
    for hint in found:
        less = (other for other in found if other is not hint and {*other.flags} < {*hint.flags})
        if all(hint.times >= other.times * (1 + GAIN) for other in less):
            yield hint


def _steps(recording: Recording) -> int:
    """Return how many steps to simulate per change."""
    tasks = Tasks(recording.events)
    steps = {task.step for task in tasks.submitted.values()}
    a_step = len(tasks.submitted) / max(1, len(steps))
    least, most = STEPS
    least += recording.plan.ahead  # the first steps only fill the pipeline
    return max(least, min(most, round(TASKS / 10 / max(1.0, a_step))))


def _changes(recording: Recording, measured: Report) -> Iterator[tuple[str, tuple[str, ...], Changes]]:
    """Yield the changes to try, as (description, flags, change)."""
    planned, tasks = recording.plan, Tasks(recording.events)
    total_s = sum(measured.critical_path.by_stage.values())
    shares = [(name, seconds / total_s) for name, seconds in measured.critical_path.by_stage.items() if total_s]
    names = {stage.name: stage for stage in planned.stages}
    slowest = [name for name, share in shares if name in names and name != ADDED and share >= SHARE][:STAGES]
    for name in slowest:
        yield f"{name} twice as fast", ("--speed", f"{name}=2x"), Changes(speed={name: 2.0})
    for stage in planned.stages:
        times = recording.durations.stages.get(stage.name)
        if isinstance(times, Recorded) and times.processes and (more := enough_processes(tasks, stage.name)):
            text = f"{more} environment processes in {stage.name} instead of {times.processes}"
            yield text, ("--environments", f"{stage.name}={more}"), Changes(environments={stage.name: more})
    if not any(group.colocated for group in planned.groups):
        yield from _schedules(planned)
    if not recording.one_process:  # if workers take turns in one process, another worker does not help
        on_cpus = {group.name: group for group in planned.groups if not group.gpus}  # all GPUs may be in use
        for name in dict.fromkeys(names[stage].groups[0] for stage in slowest if names[stage].groups):
            if name in on_cpus:
                group, workers = on_cpus[name], _more(on_cpus[name], planned)
                if _fits(recording, group, workers):
                    yield _workers(group, workers)


def _schedules(planned: Plan) -> Iterator[tuple[str, tuple[str, ...], Changes]]:
    staleness = planned.max_staleness + 1
    more = ("--max-staleness", str(staleness))
    yield f"max_staleness {staleness}", more, Changes(max_staleness=staleness)
    in_flight = ("--refit", "in_flight")
    if planned.refit == "drain":
        if planned.max_staleness:
            yield "refit in flight", in_flight, Changes(refit="in_flight")
        yield (
            f"max_staleness {staleness}, refit in flight", (*more, *in_flight),
            Changes(max_staleness=staleness, refit="in_flight"),
        )  # fmt: skip
    if planned.max_staleness and planned.on_stale == "wait":
        yield "stale groups dropped", ("--on-stale", "drop"), Changes(on_stale="drop")


def _more(group: PlacedGroup, planned: Plan) -> int:
    """Return the workers with one replica more, or with twice the replicas if they share a batch evenly."""
    shared = any(stage.sharding for stage in planned.stages if group.name in stage.groups)
    count = group.replicas * 2 if shared else group.replicas + 1
    return count * (group.workers // group.replicas)


def _fits(recording: Recording, group: PlacedGroup, workers: int) -> bool:
    """Whether the machines have cores for the threads of `group` with that many workers, and for those of all groups
    on CPUs as they are. The host group is left out: it runs plain functions, mostly while others wait."""
    cores = (recording.cores or os.cpu_count() or 1) * max(1, len(set(recording.nodes.values())))
    on_cpus = [each for each in recording.plan.groups if not each.gpus and each.name != HOST]
    return max(_threads(group, workers), sum(_threads(each, each.workers) for each in on_cpus)) <= cores


def _threads(group: PlacedGroup, workers: int) -> int:
    return workers * max(group.threads, 1)


def _workers(group: PlacedGroup, workers: int) -> tuple[str, tuple[str, ...], Changes]:
    text = f"{workers} workers in {group.name} instead of {group.workers}"
    return text, ("--workers", f"{group.name}={workers}"), Changes(workers={group.name: workers})


def _command(run: Path, flags: list[str]) -> str:
    return shlex.join([*typed("pipeline.simulate"), str(run), *flags])
