"""Training with an environment of the library verifiers: whether what is trained is what the engine drew, id by id.

python -m benchmarks.verifiers --python VENV/bin/python [--steps 10] [--out FILE]

VENV is a virtual environment with verifiers 0.4.0 (`pip install verifiers==0.4.0`). The environment is
benchmarks/of_verifiers/counted_digits.py, of three turns, with an agent in its own process; the model is a tiny one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import report
from ops.rewards import turn_sum
from pipeline import Graph
from stages import Endpoint, Prompts, Reward, verifiers_command
from tests.integration.test_foreign_clients import Spied, with_chat
from tests.unit.environments import OneTurn
from tests.unit.test_episode import FAST, execute, run_graph

ENVIRONMENT = "counted_digits"
FOLDER = Path(__file__).parent / "of_verifiers"


def version(python: str) -> str:
    """The version of verifiers of an interpreter."""
    asked = "from importlib.metadata import version; print(version('verifiers'))"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def written(python: str, tasks: Path) -> Path:
    """Write the rows of the environment's tasks to `tasks`."""
    command = [sys.executable, "-m", "stages.episode.endpoint.of_verifiers", "--python", python, ENVIRONMENT]
    with tasks.open("w") as file:
        subprocess.run(command, stdout=file, env=os.environ | {"PYTHONPATH": str(FOLDER)}, check=True)
    return tasks


def trained(python: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train, and compare."""

    def stage(policy: Any, sampler: Any) -> Endpoint:
        return Endpoint(
            policy,
            command=verifiers_command(python, ENVIRONMENT),
            on=sampler,
            given=("task",),
            variables={"PYTHONPATH": str(FOLDER)},
            samples_per_prompt=4,
            turns=4,
            tokens=40,
            turn_tokens=4,
            deadlines=replace(FAST, open_s=120.0),
        )

    graph: Graph = with_chat(run_graph(OneTurn(), steps=steps), stage)
    stages = [Reward(turn_sum) if isinstance(one, Reward) else one for one in graph.stages]
    source = Prompts(str(written(python, folder / "tasks.jsonl")), batch=1, answer=None, extra=("task",))
    began_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        spied = Spied(patch)
        execute(folder / "run", replace(graph, source=source, stages=tuple(stages)))
    drawn = [ids for turns in spied.drawn.values() for ids in turns.values()]
    equal = [
        spied.trained.get(episode, {}).get(place) == ids
        for episode, turns in spied.drawn.items()
        for place, ids in turns.items()
    ]
    return {
        "verifiers": version(python),
        "steps": steps,
        "episodes": len(spied.drawn),
        "turns": len(drawn),
        "drawn ids": sum(map(len, drawn)),
        "trained ids": sum(len(ids) for turns in spied.trained.values() for ids in turns.values()),
        "equal turns": sum(equal),
        "equal %": 100 * sum(equal) / len(equal),
        "wall s": round(time.monotonic() - began_s, 1),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has verifiers 0.4.0")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [trained(options.python, options.steps, Path(folder))]
    notes = "Each turn's ids as the engine drew them, against the ids at the same place of the trained sample."
    report("verifiers", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
