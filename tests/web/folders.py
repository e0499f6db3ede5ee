"""Run directories for tests of the web view: simulated records, written as a run writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.plan.plan import Plan
from pipeline.plan.samples import keep_vocabulary
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.unit.records import simulated

REWARDS = (0.0, 1.0)


def written(
    path: Path, plan: Plan, events: Sequence[trace.TraceEvent], texts: Sequence[str] = ("2 + 2", "4")
) -> RunDir:
    """Write a run directory with this record. Every step has the samples of one group.

    `texts` holds their prompt and responses."""
    run_dir = RunDir(path).create()
    run_dir.plan.write_bytes(msgspec.json.encode(plan))
    described = {"graph": plan.name, "started": "2026-01-01T12:00:00+0000", "args": {"api_key": "canary-of-a-secret"}}
    run_dir.run_json.write_bytes(msgspec.json.encode(described))
    append(run_dir, events)
    ended = [event for event in events if isinstance(event, trace.StepEnded) and event.step >= 0]
    lines = [{"step": event.step + 1, **_metrics(event.step)} for event in ended]
    run_dir.metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    prompt, *responses = texts
    keep_vocabulary(run_dir, [bytes([byte]) for byte in range(256)])
    for event in ended:
        rows = [_sample(event.step, n, prompt, response) for n, response in enumerate(responses)]
        run_dir.samples(event.step).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return run_dir


def append(run_dir: RunDir, events: Sequence[trace.TraceEvent]) -> None:
    """Append events to the record, with metrics for every step."""
    writer = trace.TraceWriter(run_dir.events)
    for event in events:
        if isinstance(event, trace.StepEnded) and event.step >= 0:
            event = msgspec.structs.replace(event, metrics=event.metrics | _metrics(event.step))
        writer.write(event)
    writer.close()


def run_of(path: Path, **options: Any) -> RunDir:
    """Write a complete simulated run."""
    plan, events = simulated(**options)
    return written(path, plan, events)


def _metrics(step: int) -> dict[str, float]:
    return {"reward/mean": 0.1 * step, "train/entropy": 1.0 / (step + 1)}


def _sample(step: int, n: int, prompt: str, response: str) -> dict[str, Any]:
    reward = REWARDS[n % 2]
    key = f"{step:08d}_g{n:03d}"
    ids = list(response.encode())
    return {
        "step": step,
        "key": key,
        "version": step,
        "prompt": prompt,
        "response": response,
        "reward": reward,
        "response_ids": ids,
        "rollout_logprobs": [-0.25 * (place % 24) for place, _ in enumerate(ids)],
    }
