"""A graph of which one stage runs with an interpreter of its own, and imports what only that interpreter has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import Field, Graph, Schedule, Stage, StageContext, Task, WorkerGroup

PROMPT = Field("prompt", dtype="str")
RUN_BY = Field("run_by", dtype="str")
CHILD = "import pipeline, sys; print(sys.executable, pipeline.__file__)"


@dataclass(frozen=True)
class Numbers(Stage):
    """A source whose prompts are the group numbers."""

    batch: int
    name: str = "numbers"
    group_size: int = 1
    writes: Sequence[Field] = (PROMPT,)

    def setup(self, context: StageContext) -> Any:
        return lambda columns, task: {"prompt": [str(group) for group in task.groups]}


@dataclass(frozen=True)
class RunBy(Stage):
    """Writes which interpreter runs it and its child processes, and the value of a module that only that one has."""

    on: WorkerGroup
    name: str = "run_by"
    reads: Sequence[Field] = (PROMPT,)
    writes: Sequence[Field] = (RUN_BY,)

    def setup(self, context: StageContext) -> Any:
        import only_there

        import pipeline

        child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout.strip()
        said = f"{only_there.VALUE} {sys.executable} {pipeline.__file__} {child}"

        def run(columns: dict, task: Task) -> dict:
            return {"run_by": [f"{prompt} {said}" for prompt in columns["prompt"]]}

        return run


def graph(python: str = "venv/bin/python", steps: int = 2) -> Graph:
    """Write for each prompt which interpreter has run the stage."""
    stages = (RunBy(on=WorkerGroup("apart", python=python)),)
    return Graph(name="interpreters", source=Numbers(batch=2), stages=stages, schedule=Schedule(steps=steps))
