"""A recorded run as something to simulate: its plan, its seconds, and where its workers were.

recording = recorded(Path("runs/quickstart-..."))
plan, report = simulated(recording, Changes(max_staleness=1, refit="in_flight"))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pipeline import trace
from pipeline.analysis import Report, analyse
from pipeline.errors import GraphError, Problem
from pipeline.executors.simulated import Simulation
from pipeline.history import last_run
from pipeline.plan import Plan
from pipeline.rundir import RunDir
from pipeline.simulation.durations import Durations
from pipeline.simulation.recorded import fitted
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
    run_dir = RunDir(path)
    for file in (run_dir.plan, run_dir.events):
        if not file.is_file():
            raise GraphError(
                Problem(
                    where=str(path),
                    what=f"{file.name} is not there",
                    why="a simulation reads the record of a run",
                    fix="name a folder that a run made",
                )
            )
    planned, events = _read(run_dir)
    if sum(isinstance(event, trace.StepEnded) and event.step >= 0 for event in events) < 2:
        raise GraphError(
            Problem(
                where=str(run_dir.events),
                what="fewer than two steps have ended",
                why="the first step is not like the others, and is left out",
                fix="simulate a run of more steps",
            )
        )
    cores = cores or _cores(run_dir)
    durations, notes = fitted(planned, events, cores=cores)
    if cores is None:
        notes.append("the cores of its machines are not known: nothing contends; --cores sets them")
    return Recording(
        plan=planned,
        durations=durations,
        notes=notes,
        nodes={(e.group, e.worker): e.node for e in events if isinstance(e, trace.Placed)},
        cores=cores,
        one_process=any(isinstance(event, trace.Started) and event.executor == "local" for event in events),
        events=events,
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


def _read(run_dir: RunDir) -> tuple[Plan, list[trace.TraceEvent]]:
    file = run_dir.plan
    try:
        planned = msgspec.json.decode(file.read_bytes(), type=Plan)
        file = run_dir.events
        return planned, last_run(event for _, event in trace.read(file))
    except msgspec.DecodeError as error:
        raise GraphError(
            Problem(
                where=str(file),
                what=f"it cannot be read: {error}",
                why="a run of this version wrote it",
                fix="simulate a run of this version",
            )
        ) from error


def _nodes(planned: Plan, nodes: Mapping[tuple[str, int], str]) -> dict[tuple[str, int], str]:
    """Where workers are: those that were not recorded beside those that were, in turn."""
    found = {}
    for group in planned.groups:
        known = [nodes[group.name, rank] for rank in range(len(nodes)) if (group.name, rank) in nodes]
        found.update({(group.name, rank): known[rank % len(known)] for rank in range(group.workers) if known})
    return found


def _cores(run_dir: RunDir) -> float | None:
    """The cores of the machine that run.json names."""
    if not run_dir.run_json.is_file():
        return None
    try:
        record = msgspec.json.decode(run_dir.run_json.read_bytes())
    except msgspec.DecodeError:
        return None
    found = re.search(r"(\d+) cores", str(record.get("machine"))) if isinstance(record, dict) else None
    return float(found[1]) if found else None
