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
    """Return the changed plan and the report of its simulation. Raises GraphError if a change does not apply."""
    planned, durations = changes.applied(recording.plan, recording.durations)
    simulation = Simulation(
        planned,
        durations,
        seed=seed,
        cores=recording.cores,
        nodes=_nodes(planned, recording.nodes),
        one_process=recording.one_process,
    )
    return planned, analyse(simulation.run(), planned)


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
