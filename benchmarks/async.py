"""The gain of running ahead, and its cost in staleness and lost samples.

python -m benchmarks.async [--steps 30] [--tails 0.5,1.0,1.5] [--out FILE]

The quickstart on Ray and TransferQueue, with each group returned some time after it was sampled (lognormal with the
same mean for every tail weight, benchmarks/delayed.py), which models long responses. Arms: synchronous; max_staleness
1, 2 and 4, each waiting for slow groups or dropping them, with in-flight refits; and max_staleness 1 with drained
refits. All arms have the same seed, so a group is equally slow in all of them. The table has steps per second after the
first five, the age of trained tokens in versions, the reward of trained samples in the last third of the steps, and the
lost groups, as fractions of the sampled ones: of the quickest half, of the next 40 %, and of the slowest 10 %.

Aim: at the heaviest tail max_staleness 1 is at least 1.5 x as fast as synchronous.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from benchmarks.delayed import DelayedRollout, with_delays
from benchmarks.report import report
from graphs import quickstart
from pipeline import Graph
from pipeline.engine.driver import Driver
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir

MEAN_S = 0.25
ARMS: list[tuple[int, Literal["wait", "drop"], Literal["drain", "in_flight"]]] = [
    (0, "wait", "drain"),
    (1, "wait", "drain"),
    *((k, on_stale, "in_flight") for k in (1, 2, 4) for on_stale in ("wait", "drop")),  # type: ignore[misc]
]


def described(steps: int, tail: float, staleness: int, on_stale: Any, refit: Any) -> Graph:
    """The quickstart with delayed groups and without evaluation."""
    graph = quickstart.graph(steps=steps, max_staleness=staleness, on_stale=on_stale, refit=refit, threads=1)
    return with_delays(graph, mean_s=MEAN_S, tail=tail)


def measured(run_dir: RunDir, delays: DelayedRollout, seed: int) -> dict[str, Any]:
    """Speed, age, reward and lost groups of a run, from its files."""
    lines = [line for line in map(json.loads, run_dir.metrics.read_text().splitlines()) if line["step"] > 0]
    steady = lines[5:] or lines
    events = [event for _, event in trace.read(run_dir.events)]
    sampled = [group for event in events if isinstance(event, trace.Admitted) for group in event.groups]
    lost = {group for event in events if isinstance(event, trace.Dropped) for group in event.groups}
    slow = sorted(sampled, key=lambda group: delays.delay_s(seed, group))
    edges = [0, len(slow) // 2, len(slow) * 9 // 10, len(slow)]
    parts = [slow[start:stop] for start, stop in pairwise(edges)]
    return {
        "steps/s": round(len(steady) / sum(line["time/step_s"] for line in steady), 3),
        "age": round(statistics.fmean(line["train/staleness_mean"] for line in steady), 2),
        "oldest": max(line["train/staleness_max"] for line in lines),
        "reward": round(statistics.fmean(line["reward/mean"] for line in lines[-len(lines) // 3 :]), 3),
        "mismatch KL": round(statistics.fmean(line["train/mismatch_kl"] for line in steady), 5),
        "lost %": round(100 * len(lost) / len(sampled), 1),
        **{
            f"{name} %": round(100 * sum(group in lost for group in part) / max(1, len(part)), 1)
            for name, part in zip(("quick", "slow", "slowest"), parts)
        },
    }


def run(steps: int, tail: float, staleness: int, on_stale: str, refit: str, folder: Path) -> dict[str, Any]:
    """Run one arm."""
    from pipeline.executors.ray import RayExecutor

    graph = described(steps, tail, staleness, on_stale, refit)
    run_dir = RunDir(folder).create()
    Driver(graph, plan(graph)[0], RayExecutor(modules=[sys.modules["benchmarks.delayed"]]), run_dir=run_dir).execute()
    rollout: Any = next(stage for stage in graph.stages if isinstance(stage, DelayedRollout))
    arm = "sync" if staleness == 0 else f"k={staleness} {on_stale}" + (", drained" if refit == "drain" else "")
    return {"tail": tail, "arm": arm, **measured(run_dir, rollout, graph.schedule.seed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tails", default="0.5,1.0,1.5")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    tails = [float(tail) for tail in options.tails.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for tail in tails:
            for arm in ARMS:
                rows.append(run(options.steps, tail, *arm, folder=Path(folder) / str(len(rows))))
                sync = next(row for row in rows if row["tail"] == tail)
                rows[-1]["x sync"] = round(rows[-1]["steps/s"] / sync["steps/s"], 2)
                print(rows[-1], file=sys.stderr, flush=True)
    ahead = [row["x sync"] for row in rows if row["tail"] == tails[-1] and row["arm"].startswith("k=1")]
    notes = (
        f"{options.steps} steps of 32 x 16 samples, delays lognormal with mean {MEAN_S:g} s. At tail {tails[-1]:g}, "
        f"max_staleness 1 is {min(ahead):.2f} to {max(ahead):.2f} x as fast as synchronous; aim: 1.5."
    )
    report("async", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
