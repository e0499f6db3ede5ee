"""A graph without a model, for runs in which only the movement of columns matters. Loaded by path, as users' are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import Field, Graph, Schedule, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.stage import External

PROMPT = Field("prompt", dtype="str")
SHOUT = Field("shout", dtype="str")
SCORE = Field("score", dtype="float32")
MARKS = Field("marks", dtype="int64", dims="N M")
GRADES = Field("grades", dtype="float32", dims="N M")


@dataclass(frozen=True)
class Numbers(Stage):
    """A source whose prompts are the group numbers."""

    batch: int
    name: str = "numbers"
    group_size: int = 2
    writes: Sequence[Field] = (PROMPT,)

    def setup(self, context: StageContext) -> Any:
        return lambda columns, task: {"prompt": [str(g) for g in task.groups for _ in range(context.group_size)]}


@dataclass(frozen=True)
class Shout(Stage):
    """Doubles each prompt; raises an error at the group `bad`, or is interrupted there."""

    bad: int = -1
    interrupted: bool = False
    name: str = "shout"
    on: WorkerGroup | None = None
    reads: Sequence[Field] = (PROMPT,)
    writes: Sequence[Field] = (SHOUT,)

    def setup(self, context: StageContext) -> Any:
        def run(columns: dict, task: Task) -> dict:
            if str(self.bad) in columns["prompt"]:
                if self.interrupted:
                    raise KeyboardInterrupt
                raise ArithmeticError(f"group {self.bad} is bad")
            return {"shout": [text * 2 for text in columns["prompt"]]}

        return run


@dataclass(frozen=True)
class Mark(Stage):
    """Gives sample i of a group i + 1 marks: tens of the group number, with i added."""

    name: str = "mark"
    per: str = "group"
    reads: Sequence[Field] = (PROMPT,)
    writes: Sequence[Field] = (MARKS,)

    def setup(self, context: StageContext) -> Any:
        import torch

        from pipeline.declare.columns import Ragged

        def run(columns: dict, task: Task) -> dict:
            indexed = [(i % context.group_size, text) for i, text in enumerate(columns["prompt"])]
            return {"marks": Ragged.of([torch.full((i + 1,), 10 * int(text) + i) for i, text in indexed])}

        return run


@dataclass(frozen=True)
class Listen(Stage):
    """Reads what came from outside and reports its sums, the grades' by sample."""

    name: str = "listen"
    per: str = "group"
    reads: Sequence[Field] = (SHOUT, SCORE, GRADES)

    def setup(self, context: StageContext) -> Any:
        from pipeline import Output

        def run(columns: dict, task: Task) -> Output:
            grades = [float(row.sum()) for row in columns["grades"].rows()]
            first, second = sum(grades[::2]), sum(grades[1::2])
            return Output(metrics={"sum": float(columns["score"].sum()), "first": first, "second": second})

        return run


def graph(
    steps: int = 3, batch: int = 4, bad: int = -1, interrupted: bool = False, workers: int = 1, external: bool = False
) -> Graph:
    """Double numbers as text; with `external`, a process outside the graph writes a score for each sample, and a grade
    for each mark."""
    group = WorkerGroup("shouters", workers=workers)
    stages: tuple[Stage, ...] = (Shout(bad=bad, interrupted=interrupted, on=group),)
    if external:
        stages += (Mark(), External((SCORE, GRADES), timeout_s=240.0, reads=(SHOUT, MARKS)), Listen())
    return Graph(name="small", source=Numbers(batch=batch), stages=stages, schedule=Schedule(steps=steps))
