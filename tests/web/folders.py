"""Run directories for tests of the web view: simulated records, written as a run writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.declare.task import Task
from pipeline.declare.times import ENVIRONMENT, GENERATE, PROCESS, SampleTimes
from pipeline.plan.plan import Plan
from pipeline.plan.samples import keep_vocabulary
from pipeline.record import trace
from pipeline.record.spent import spent
from pipeline.rundir import RunDir
from tests.unit.records import simulated

REWARDS = (0.0, 1.0)
SECRET = "canary-of-a-secret"


def written(
    path: Path, plan: Plan, events: Sequence[trace.TraceEvent], texts: Sequence[str] = ("2 + 2", "4")
) -> RunDir:
    """Write a run directory with this record. Every step has the samples of one group.

    `texts` holds their prompt and responses."""
    run_dir = RunDir(path).create()
    run_dir.plan.write_bytes(msgspec.json.encode(plan))
    described = {"graph": plan.name, "started": "2026-01-01T12:00:00+0000", "args": {"api_key": SECRET}}
    described["command"] = ["python", "-m", "pipeline.run", "toy.py", "--api-key", SECRET, f"--hub.token={SECRET}"]
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


def episodes_of(path: Path, **options: Any) -> RunDir:
    """Write a simulated run whose rollouts have the times of two episodes per group, and whose samples have turns: the
    first of two turns ended as `answered`, the second of one as `failed`."""
    plan, events = simulated(**options)
    timed: list[trace.TraceEvent] = []
    for event in events:
        timed.append(event)
        if isinstance(event, trace.Ran) and event.stage == "rollout":
            task = Task(stage=event.stage, step=event.step, groups=event.groups, number=event.task)
            timed += [spent(task, group, _episodes(event), {}, (event.group, event.worker)) for group in event.groups]
    run_dir = written(path, plan, timed)
    for file in run_dir.path.glob("samples/*.jsonl"):
        (row,) = map(msgspec.json.decode, file.read_bytes().splitlines())
        key = row["key"].partition("_")[0]
        rows = [row | {"key": f"{key}_g{n:03d}"} | turns for n, turns in enumerate(TURNS)]
        file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    return run_dir


def _episodes(event: trace.Ran) -> list[SampleTimes]:
    """Return two episodes that are sampled for the first half of a task; the environment of one works from then on, and
    the other one waits for it from the third quarter on."""
    quarter_s = (event.end_s - event.start_s) / 4
    both = [SampleTimes(event.start_s), SampleTimes(event.start_s)]
    for one in both:
        one.until(GENERATE, event.start_s + 2 * quarter_s)
    both[0].until(ENVIRONMENT, event.end_s)
    both[1].until(GENERATE, event.start_s + 3 * quarter_s)
    both[1].until(PROCESS, event.end_s)
    return both


def _turns(end: str, *parts: tuple[str, bool]) -> dict[str, Any]:
    ids = [byte for text, _ in parts for byte in text.encode()]
    lengths = [len(text.encode()) for text, _ in parts]
    return {
        "response_ids": ids,
        "rollout_logprobs": [0.0] * len(ids),
        "token_versions": [0 if drawn else -1 for text, drawn in parts for _ in text.encode()],
        "turn_ends": [sum(lengths[: n + 1]) for n, (_, drawn) in enumerate(parts) if drawn],
        "turn_rewards": [-0.5 for _, drawn in parts if drawn],
        "end": end,
        "conversation": "[]",
        "response": parts[-1][0],
    }


TURNS = (
    _turns("answered", ("17*23=", True), ("391>", False), ("<b>391</b>", True)),
    _turns("failed:0:ValueError", ("17+=", True)),
)


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
