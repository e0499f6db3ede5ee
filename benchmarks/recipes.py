"""The curves of the recipes that learn on two cores: held-out score by step, over five seeds.

python -m benchmarks.recipes [--only quickstart tool code] [--seeds 5] [--steps N] [--out FILE]

Each seed runs `python -m pipeline.run RECIPE --seed N` in a fresh process, start-up included. A row is a recipe: the
medians of wall time and of the score before and after, and in the file the score of every seed at every evaluation,
which the page of the recipes draws.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import report
from pipeline.rundir import RunDir

SCORES = {"quickstart": "eval/exact_match", "tool": "eval/exact_match", "code": "eval/passes_tests"}  # on held-out rows
RUN_S = 600


def ran(words: Sequence[str], folder: Path) -> tuple[float, list[dict[str, Any]]]:
    """Run `python -m pipeline.run` with these words in a fresh process. Returns its wall seconds, and its metrics."""
    command = [sys.executable, "-m", "pipeline.run", *words, "--run-dir", str(folder)]
    began_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    wall_s = time.monotonic() - began_s
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return wall_s, [json.loads(line) for line in RunDir(folder).metrics.read_text().splitlines()]


def curve_of(recipe: str, seed: int, steps: int | None, folder: Path) -> tuple[float, list[tuple[int, float]]]:
    """Run a recipe. Returns its wall seconds, and its score after each step that evaluated."""
    wall_s, lines = ran([recipe, "--seed", str(seed), *(["--steps", str(steps)] if steps else [])], folder)
    score = SCORES[recipe]
    return wall_s, [(line["step"], round(line[score], 4)) for line in lines if score in line]


def row_of(recipe: str, seeds: int, steps: int | None, folder: Path) -> dict[str, Any]:
    """Run a recipe with every seed. Returns its row."""
    walls, curves = [], []
    for seed in range(seeds):
        wall_s, curve = curve_of(recipe, seed, steps, folder / f"{recipe}-{seed}")
        print(f"{recipe}, seed {seed}: {wall_s:.1f} s, {curve}", file=sys.stderr, flush=True)
        walls.append(wall_s)
        curves.append(curve)
    first, last = [curve[0][1] for curve in curves], [curve[-1][1] for curve in curves]
    return {
        "recipe": recipe,
        "seeds": seeds,
        "score": SCORES[recipe],
        "steps": curves[0][-1][0],
        "wall s": round(statistics.median(walls), 1),
        "before": round(statistics.median(first), 3),
        "after": round(statistics.median(last), 3),
        "worst after": min(last),
        "curves": curves,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCORES, default=list(SCORES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="instead of the recipes' own")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row_of(recipe, options.seeds, options.steps, Path(folder)) for recipe in options.only]
    notes = "Medians over the seeds; wall time with start-up."
    report("recipes", rows, [name for name in rows[0] if name != "curves"], notes, options.out)


if __name__ == "__main__":
    main()
