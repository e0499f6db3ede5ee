"""A recorded run as something to simulate: its plan, its seconds, and where its workers were.

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


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to simulate. `events` are those of the run, none where it is a graph that was never run; `cores`
    are those of each machine, None where they are not known."""

    plan: Plan
    durations: Durations
    notes: list[str] = []
    nodes: Mapping[tuple[str, int], str] = {}
    cores: float | None = None
    one_process: bool = False
    events: list[trace.TraceEvent] = []


def recorded(path: Path, *, cores: float | None = None) -> Recording:
    """The recording of a run directory. `cores` are those of each machine, None asks the record.

    Raises GraphError where it is none, or holds too little.
    """
    return recording_of(open_run(path), cores=cores)


def recording_of(run: OpenedRun, *, cores: float | None = None) -> Recording:
    """The recording of a run that was read; see `recorded`."""
    if sum(isinstance(event, trace.StepEnded) and event.step >= 0 for event in run.events) < 2:
        raise GraphError(
            Problem(
                where=str(RunDir(run.path).events),
                what="fewer than two steps have ended",
                why="the first step is not like the others, and is left out",
                fix="simulate a run of more steps",
            )
        )
    cores = cores or _cores(run)
    durations, notes = fitted(run.plan, run.events, cores=cores)
    if cores is None:
        notes.append("the cores of its machines are not known: nothing contends; --cores sets them")
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
    """The changed plan and the report of its simulation. Raises GraphError where the plan has no place for a change."""
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


def _nodes(planned: Plan, nodes: Mapping[tuple[str, int], str]) -> dict[tuple[str, int], str]:
    """Where workers are: those that were not recorded beside those that were, in turn."""
    found = {}
    for group in planned.groups:
        known = [nodes[group.name, rank] for rank in range(len(nodes)) if (group.name, rank) in nodes]
        found.update({(group.name, rank): known[rank % len(known)] for rank in range(group.workers) if known})
    return found


def _cores(run: OpenedRun) -> float | None:
    """The cores of the machine that run.json names."""
    found = re.search(r"(\d+) cores", str(run.described.get("machine")))
    return float(found[1]) if found else None
