"""The cost of staleness in quality: the quickstart's held-out exact match, synchronous and with older samples.

python -m benchmarks.staleness [--seeds 5] [--out FILE]

Runs are in process and therefore reproducible: with max_staleness k, every batch after the first k is sampled with
weights k versions old. Arms: synchronous; max_staleness 2 with truncated importance sampling, as with `--max-staleness
2`; and max_staleness 4 with and without the correction. All arms use the same number of samples. Exact match is greedy,
on 1,000 held-out prompts, after half of the steps and at the end.

Aim: the median of max_staleness 2 within 0.03 of synchronous.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import report
from graphs import quickstart
from pipeline import Graph
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from stages import ClippedLoss, Train

ARMS = {"sync": (0, True), "k=2": (2, True), "k=4": (4, True), "k=4, uncorrected": (4, False)}


class Uncorrected(ClippedLoss):
    """A loss that claims to correct for older samples and does not."""

    @property
    def corrects_off_policy(self) -> bool:
        return True


def described(seed: int, staleness: int, corrected: bool) -> Graph:
    """The quickstart, without its correction unless `corrected`."""
    graph = quickstart.graph(seed=seed, max_staleness=staleness)
    if corrected:
        return graph
    return replace(
        graph, stages=tuple(replace(s, loss=Uncorrected()) if isinstance(s, Train) else s for s in graph.stages)
    )


def run(seed: int, arm: str, folder: Path) -> dict[str, Any]:
    """Run one arm. Returns exact match before, half-way and after, and the mismatch of sampler and trainer."""
    graph = described(seed, *ARMS[arm])
    run_dir = RunDir(folder).create()
    Driver(graph, plan(graph)[0], LocalExecutor(), run_dir=run_dir).execute()
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    match = {line["step"]: line["eval/exact_match"] for line in lines if "eval/exact_match" in line}
    trained = [line for line in lines if line["step"] > 0]
    half = min(match, key=lambda step: abs(step - graph.schedule.steps / 2))
    return {
        "arm": arm,
        "seed": seed,
        "warm start": match[0],
        "half-way": match[half],
        "exact match": match[graph.schedule.steps],
        "age": round(statistics.fmean(line["train/staleness_mean"] for line in trained), 2),
        "mismatch KL": round(statistics.fmean(line["train/mismatch_kl"] for line in trained), 5),
        "ratio max": round(max(line["train/ratio_max"] for line in trained), 2),
    }


def medians(rows: Sequence[dict[str, Any]], column: str) -> dict[str, float]:
    """Medians over the seeds of each arm."""
    return {arm: statistics.median(row[column] for row in rows if row["arm"] == arm) for arm in ARMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for arm in ARMS:
                rows.append(run(seed, arm, Path(folder) / str(len(rows))))
                print(rows[-1], file=sys.stderr, flush=True)
    last, half = medians(rows, "exact match"), medians(rows, "half-way")
    message = "; ".join(f"{arm} {half[arm]:.3f} half-way, {last[arm]:.3f} at the end" for arm in ARMS)
    notes = (
        f"Medians of {options.seeds} seeds: {message}. max_staleness 2 is {abs(last['k=2'] - last['sync']):.3f} from "
        "synchronous; aim: within 0.03."
    )
    report("staleness", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
