"""What would make a recorded run faster: small changes, each simulated for a few steps, the best first.

    found = hints(recording_of(run), run.path)
    found.hints[0]          # Hint(text="train twice as fast", times=1.31, command="python -m pipeline.simulate ...")

Every number is the one that its command prints, and `base` is the command of the run as it was. How much is simulated
follows from the number of tasks a step, so the same record gives the same hints.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pipeline.analysis.report import Report, analyse
from pipeline.errors import SluiceError
from pipeline.plan.gate import ADDED
from pipeline.plan.plan import Plan
from pipeline.record.history import Tasks
from pipeline.simulation.recording import Recording, simulated
from pipeline.simulation.whatif import Changes

COMMAND = ("python", "-m", "pipeline.simulate")
TASKS = 10_000  # that are simulated in all, about
STEPS = (4, 12)  # that are simulated of each change
STAGES = 3  # of the critical path that are looked at
SHARE = 0.05  # of the step that such a stage has on the path
GAIN = 0.01  # that a hint is worth


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """One change: `times` is how many times as fast a step would be, of `step_s` seconds; `flags` are those of
    `pipeline.simulate`, and `command` the whole line, which prints the same `step_s`."""

    text: str
    times: float
    step_s: float
    flags: tuple[str, ...]
    command: str


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """`measured_s` and `simulated_s` are seconds per step of the run and of its simulation as it was, by the command
    `base`. `hints` is empty where no change is worth it, or nothing can be simulated: `notes` says why."""

    measured_s: float
    simulated_s: float
    base: str
    hints: tuple[Hint, ...]
    notes: tuple[str, ...]


def hints(recording: Recording, run: Path, *, measured: Report | None = None) -> Hints:
    """The hints of a recorded run. `run` is its directory, as the commands name it; `measured` its report, where it is
    known."""
    planned = recording.plan
    measured = measured or analyse(recording.events, planned)
    steps, notes = _steps(recording), list(recording.notes)
    absent = [stage.name for stage in planned.stages if stage.name not in {*recording.durations.stages, ADDED}]
    common = ["--steps", str(steps), *(part for name in absent for part in ("--stage", f"{name}=0"))]
    if absent:
        notes.append(f"{', '.join(absent)} has not run yet: taken to need no time")
    base = Changes(steps=steps, stages=dict.fromkeys(absent, "0"))
    as_it_was = simulated(recording, base)[1].steps.mean
    found = []
    for text, flags, change in _changes(recording, measured):
        try:
            step_s = simulated(recording, msgspec.structs.replace(change, steps=steps, stages=base.stages))[
                1
            ].steps.mean
        except SluiceError:  # the run has no place for the change, or cannot go on with it
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
    )


def _worth(found: list[Hint]) -> Iterator[Hint]:
    """Without those that change more than another one, and gain no more."""
    for hint in found:
        less = (other for other in found if other is not hint and {*other.flags} < {*hint.flags})
        if all(hint.times >= other.times * (1 + GAIN) for other in less):
            yield hint


def _steps(recording: Recording) -> int:
    """How many steps of each change are simulated."""
    tasks = Tasks(recording.events)
    steps = {task.step for task in tasks.submitted.values()}
    a_step = len(tasks.submitted) / max(1, len(steps))
    least, most = STEPS
    least += recording.plan.ahead  # the first ones fill what is in flight
    return max(least, min(most, round(TASKS / 10 / max(1.0, a_step))))


def _changes(recording: Recording, measured: Report) -> Iterator[tuple[str, tuple[str, ...], Changes]]:
    """What is tried: a sentence, its flags, and the change."""
    planned = recording.plan
    total_s = sum(measured.critical_path.by_stage.values())
    shares = [(name, seconds / total_s) for name, seconds in measured.critical_path.by_stage.items() if total_s]
    names = {stage.name: stage for stage in planned.stages}
    slowest = [name for name, share in shares if name in names and name != ADDED and share >= SHARE][:STAGES]
    for name in slowest:
        yield f"{name} twice as fast", ("--speed", f"{name}=2x"), Changes(speed={name: 2.0})
    if not any(group.colocated for group in planned.groups):
        yield from _schedules(planned)
    if not recording.one_process:  # where workers take turns, one more of them is no faster
        for name in dict.fromkeys(names[stage].groups[0] for stage in slowest if names[stage].groups):
            yield _workers(planned, name)


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
        yield "what is too old is dropped", ("--on-stale", "drop"), Changes(on_stale="drop")


def _workers(planned: Plan, name: str) -> tuple[str, tuple[str, ...], Changes]:
    """One replica more, or twice as many where they share a batch evenly."""
    group = next(group for group in planned.groups if group.name == name)
    shared = any(stage.sharding for stage in planned.stages if name in stage.groups)
    count = group.replicas * 2 if shared else group.replicas + 1
    width = group.workers // group.replicas
    text = f"{count * width} workers in {name} in place of {group.workers}"
    return text, ("--workers", f"{name}={count * width}"), Changes(workers={name: count * width})


def _command(run: Path, flags: list[str]) -> str:
    return shlex.join([*COMMAND, str(run), *flags])
