"""A recorded run to simulate: its plan, its durations, and the machines of its workers.

recording = recorded(Path("runs/quickstart-..."))
plan, report = simulated(recording, Changes(max_staleness=1, refit="in_flight"))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pipeline.analysis.report import Report, analyse
from pipeline.errors import GraphError, Problem
from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.record.runs import OpenedRun, open_run
from pipeline.rundir import RunDir
from pipeline.simulation.durations import Durations
from pipeline.simulation.recorded import fitted
from pipeline.simulation.virtual_run import Simulation
from pipeline.simulation.whatif import Changes

LATEST_S = 1e10  # no clock that starts with its machine is later
OFF = 0.15  # if the unchanged simulation of a record is further from it, as a fraction, it foretells no change


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A run to simulate. `events` is empty for a graph that was never run. `cores` is the number of cores per machine,
    None if unknown."""

    plan: Plan
    durations: Durations
    notes: list[str] = []
    nodes: Mapping[tuple[str, int], str] = {}
    cores: float | None = None
    one_process: bool = False
    events: list[trace.TraceEvent] = []


def recorded(path: Path, *, cores: float | None = None) -> Recording:
    """Return the recording of a run directory. `cores` is the number of cores per machine, by default as recorded.

    Raises GraphError if `path` is not a run directory or fewer than two steps have ended.
    """
    return recording_of(open_run(path), cores=cores)


def recording_of(run: OpenedRun, *, cores: float | None = None) -> Recording:
    """Return the recording of a run that is already open; see `recorded`."""
    if sum(isinstance(event, trace.StepEnded) and event.step >= 0 for event in run.events) < 2:
        raise GraphError(
            Problem(
                where=str(RunDir(run.path).events),
                what="fewer than two steps have ended",
                why="the first step includes loading and compilation, and is left out",
                fix="simulate a run of more steps",
            )
        )
    _check_times(run)
    cores = cores or _cores(run)
    durations, notes = fitted(run.plan, run.events, cores=cores)
    if cores is None:
        notes.append("the number of cores per machine is unknown: contention is not simulated; --cores sets it")
    return Recording(
        plan=run.plan,
        durations=durations,
        notes=notes,
        nodes={(e.group, e.worker): e.node for e in run.events if isinstance(e, trace.Placed)},
        cores=cores,
        one_process=any(isinstance(event, trace.Started) and event.executor == "local" for event in run.events),
        events=run.events,
    )


def simulated(recording: Recording, changes: Changes, *, seed: int = 0) -> tuple[Plan, Report]:
    """Return the changed plan and the report of its simulation. Raises GraphError if a change does not apply.

    The last steps of a run that samples ahead are shorter, since nothing more is sampled. If the record ends before
    its run, the report is without as many of these steps as the record lacks.
    """
    changes.check(recording.plan, recording.durations)
    durations, environments = recording.durations, changes.environments
    if environments:
        durations = fitted(recording.plan, recording.events, cores=recording.cores, environments=environments)[0]
    planned, durations = changes.applied(recording.plan, durations)
    simulation = Simulation(
        planned,
        durations,
        seed=seed,
        cores=recording.cores,
        nodes=_nodes(planned, recording.nodes),
        one_process=recording.one_process,
    )
    lacks = recording.plan.steps - 1 - _last_step(recording.events) if recording.events else 0
    return planned, analyse(_without(simulation.run(), planned.steps, min(lacks, planned.ahead)), planned)


def disagreement(as_it_was: Report, measured: Report) -> str | None:
    """Return by how much the unchanged simulation of a record is off; None if it is close, or nothing was measured."""
    simulated_s, measured_s = as_it_was.steps.mean, measured.steps.mean
    if not measured_s or abs(simulated_s / measured_s - 1) <= OFF:
        return None
    much = f"{abs(100 * (simulated_s / measured_s - 1)):.0f} % {'more' if simulated_s > measured_s else 'less'}"
    return f"simulated as it was, a step takes {simulated_s:.3f} s, {much} than measured"


def _last_step(events: list[trace.TraceEvent]) -> int:
    """Return the last step of a record, counted from 0; -1 if none has ended."""
    return max((event.step for event in events if isinstance(event, trace.StepEnded)), default=-1)


def _without(events: list[trace.TraceEvent], steps: int, count: int) -> list[trace.TraceEvent]:
    """Return the events of a run up to the end of its last step but `count`; all of them if too few were left."""
    last = steps - 1 - count
    if count <= 0 or last < 1:
        return events
    ends = (n for n, event in enumerate(events) if isinstance(event, trace.StepEnded) and event.step == last)
    return events[: next(ends) + 1]


def _check_times(run: OpenedRun) -> None:
    """Raise GraphError if an event of a damaged record has a time that cannot be: the simulation would never end."""
    for event in run.events:
        found = (getattr(event, name, None) for name in ("start_s", "end_s", "at_s"))
        times_s = [time_s for time_s in found if time_s is not None]
        if times_s != sorted(times_s) or not all(0 <= time_s < LATEST_S for time_s in times_s):
            raise GraphError(
                Problem(
                    where=str(RunDir(run.path).events),
                    what=f"a line of type {type(event).__struct_config__.tag!r} has the times {times_s}",
                    why="times are seconds of a clock that never goes back, and a span does not end before it starts",
                    fix="the file is damaged: simulate another run",
                )
            )


def _nodes(planned: Plan, nodes: Mapping[tuple[str, int], str]) -> dict[tuple[str, int], str]:
    """Return the machine of each worker. Workers that were not recorded are spread over the recorded machines."""
    found = {}
    for group in planned.groups:
        known = [nodes[group.name, rank] for rank in range(len(nodes)) if (group.name, rank) in nodes]
        found.update({(group.name, rank): known[rank % len(known)] for rank in range(group.workers) if known})
    return found


def _cores(run: OpenedRun) -> float | None:
    """Return the number of cores of the machine in run.json; None if it is missing."""
    found = re.search(r"(\d+) cores", str(run.described.get("machine")))
    return float(found[1]) if found else None
