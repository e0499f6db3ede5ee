"""Write the run directory of a simulated run, as complete as that of a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.schedule.events import Save
from pipeline.simulation.durations import Durations
from pipeline.simulation.virtual_run import Simulation


def write_run(folder: Path, plan: Plan, durations: Durations, **options: Any) -> Path:
    """Simulate a plan and write plan.json, events.jsonl, metrics.jsonl and the checkpoint manifests."""
    writer = trace.TraceWriter(folder / "events.jsonl")
    lines = []

    def write(event: trace.TraceEvent) -> None:
        writer.write(event)
        if isinstance(event, trace.StepEnded):
            lines.append({"step": event.step + 1, "version": event.step + 1, **event.metrics})

    def save(_now_s: float, _events: object, decisions: list) -> None:
        for decision in decisions:
            if isinstance(decision, Save):
                done = decision.step + 1
                manifest = {"steps": done, "version": done}
                manifest |= {"next_group": decision.next_group, "pending": decision.pending}
                checkpoint = folder / "checkpoints" / f"step_{done:06d}"
                checkpoint.mkdir(parents=True)
                (checkpoint / "manifest.json").write_bytes(msgspec.json.encode(manifest))

    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    Simulation(plan, durations, write=write, watch=save, **options).run()
    writer.close()
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return folder
