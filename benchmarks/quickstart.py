"""What the README's first command achieves: exact match and wall time of the quickstart over five seeds.

python -m benchmarks.quickstart [--task reverse] [--seeds 5] [--out FILE]

Each seed runs the command itself in a fresh process, start-up included. The first seed runs twice and must give the
same weights. Aims on `reverse`: within 150 s; greedy exact match on 1,000 held-out prompts with a median of at least
0.90 and never below 0.85; a median of at least 0.4 above the warm start.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.recipes import ran
from benchmarks.report import report
from pipeline.rundir import RunDir


def run(task: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run: wall seconds, exact match before and after, hash of the final weights."""
    wall_s, lines = ran(["graphs/quickstart.py", "--task", task, "--seed", str(seed)], folder)
    run_dir = RunDir(folder)
    scores = [line["eval/exact_match"] for line in lines if "eval/exact_match" in line]
    last = run_dir.checkpoint(run_dir.checkpoint_steps()[-1]) / "train" / "weights.safetensors"
    steps_s = [line["time/step_s"] for line in lines if line["step"] > 5]
    return {
        "seed": seed,
        "wall s": round(wall_s, 1),
        "steps": lines[-1]["step"],
        "ms per step": round(statistics.median(steps_s) * 1e3, 1),
        "warm start": scores[0],
        "exact match": scores[-1],
        "gain": round(scores[-1] - scores[0], 3),
        "weights sha256": hashlib.sha256(last.read_bytes()).hexdigest()[:12],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("reverse", "sort", "add"), default="reverse")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate([*range(options.seeds), 0]):
            rows.append(run(options.task, seed, Path(folder) / str(number)))
            print(rows[-1], file=sys.stderr, flush=True)
    distinct = rows[:-1]
    same = rows[0]["weights sha256"] == rows[-1]["weights sha256"]
    matches, gains = [row["exact match"] for row in distinct], [row["gain"] for row in distinct]
    notes = (
        f"{options.task}: exact match median {statistics.median(matches):.3f}, minimum {min(matches):.3f}; gain median "
        f"{statistics.median(gains):.3f}; wall time at most {max(row['wall s'] for row in rows):.1f} s. "
        f"Seed 0 twice: {'the same' if same else 'OTHER'} weights."
    )
    report("quickstart", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
