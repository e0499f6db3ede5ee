"""A graph without a model that samples slowly at times, for real runs in which groups become stale and are dropped.

Its policy is a version number: the trainer adds one, the refit sends it, and the sampler stamps tokens with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import Field, Graph, Model, Output, Schedule, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Columns
from pipeline.declare.stage import Gate
from pipeline.declare.task import Per

PROMPT = Field("prompt", dtype="str")
TOKENS = Field("tokens", dtype="int64", dims="N T")
VERSIONS = Field("token_versions", dtype="int32", dims="N T", unit="version")
SCORE = Field("score", dtype="float32")
KEPT = Field("kept", dtype="bool")
TRAINED = Field("trained_weights", dtype="weights", dims="", unit="version")
SERVED = Field("served_weights", dtype="weights", dims="", unit="version")

SAMPLER = WorkerGroup("sampler", backend="python", workers=2)
LEARNER = WorkerGroup("learner", backend="python")
POLICY = Model("a number")
SIZE = 2


@dataclass(frozen=True)
class Count(Stage):
    """A source whose prompts are the group numbers."""

    batch: int
    name: str = "count"
    writes: Sequence[Field] = (PROMPT,)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Columns]:
        return lambda columns, task: {"prompt": [str(group) for group in task.groups for _ in range(SIZE)]}


@dataclass(frozen=True)
class Sample(Stage):
    """Three tokens per sample. Every `slow`-th group is slow; the group `late` ends only after version 3 is served."""

    slow: int
    late: int
    name: str = "sample"
    shape = "stream"
    per: Per = "group"
    on: WorkerGroup | None = SAMPLER
    group_size: int | None = SIZE
    reads: Sequence[Field] = (PROMPT,)
    reads_back: Sequence[Field] = (SERVED,)
    writes: Sequence[Field] = (TOKENS, VERSIONS)
    stamps: Field | None = VERSIONS
    bounds = {"T": 3}

    @property
    def uses(self) -> tuple[Model, ...]:
        return (POLICY,)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], AsyncIterator[Output]]:
        import torch

        from pipeline.declare.columns import Ragged

        async def one(position: int, group: int) -> Output:
            versions = []
            for _ in range(3):
                versions.append(context.shared.get("version", 0))
                pauses = 40 if self.slow and group % self.slow == 1 else 1
                while pauses or (group == self.late and context.shared.get("version", 0) < 3):
                    if group in context.cancelled:
                        return Output(cancelled={position: len(versions)})
                    pauses = max(0, pauses - 1)
                    await asyncio.sleep(0.002)
            values, lengths = torch.tensor(versions * SIZE, dtype=torch.int32), (3,) * SIZE
            columns: Columns = {
                "tokens": Ragged(values.to(torch.int64), lengths),
                "token_versions": Ragged(values, lengths),
            }
            return Output(columns=columns, index=range(position * SIZE, (position + 1) * SIZE))

        async def run(columns: Columns, task: Task) -> AsyncIterator[Output]:
            groups = [asyncio.ensure_future(one(position, group)) for position, group in enumerate(task.groups)]
            for output in asyncio.as_completed(groups):
                yield await output

        return run


@dataclass(frozen=True)
class Score(Stage):
    """A random number per sample, the same in every run."""

    name: str = "score"
    reads: Sequence[Field] = (TOKENS,)
    writes: Sequence[Field] = (SCORE,)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Columns]:
        import torch

        return lambda columns, task: {
            "score": torch.tensor([random.Random(group).random() for group in task.groups for _ in range(SIZE)])
        }


@dataclass(frozen=True)
class Sieve(Stage):
    """Drops groups with a low score."""

    name: str = "sieve"
    per: Per = "group"
    reads: Sequence[Field] = (SCORE,)
    writes: Sequence[Field] = (KEPT,)
    gate = Gate(KEPT)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        import torch

        def run(columns: Columns, task: Task) -> Output:
            scores: Any = columns["score"]
            low = {i: "low score" for i in range(len(task.groups)) if scores[i * SIZE] < 0.3}
            kept = (len(task.groups) - len(low)) * SIZE
            return Output(columns={"kept": torch.ones(kept, dtype=torch.bool)}, dropped=low)

        return run


@dataclass(frozen=True)
class Look(Stage):
    """Uses the trainer's weights, as logprobs of a batch do: no step may train before it ends."""

    name: str = "look"
    per: Per = "batch"
    on: WorkerGroup | None = LEARNER
    reads: Sequence[Field] = (TOKENS,)

    @property
    def uses(self) -> tuple[Model, ...]:
        return (POLICY,)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        return lambda columns, task: Output(metrics={"version": float(context.shared.get("trained", 0))})


class _Trainer:
    """Counts steps; raises at the step `fails_at`."""

    def __init__(self, shared: dict[Any, Any], fails_at: int) -> None:
        self._shared, self._fails_at = shared, fails_at

    def __call__(self, columns: Columns, task: Task) -> Output:
        if task.step == self._fails_at:
            raise ArithmeticError("this step fails")
        time.sleep(0.01)
        self._shared["trained"] = task.step + 1
        return Output(weights=(task.step + 1, ""))

    def save(self, folder: Any) -> None:
        (folder / "version").write_text(str(self._shared["trained"]))

    def restore(self, folder: Any) -> None:
        self._shared["trained"] = int((folder / "version").read_text())


@dataclass(frozen=True)
class Learn(Stage):
    """Adds one to the version."""

    fails_at: int = -1
    name: str = "learn"
    per: Per = "batch"
    on: WorkerGroup | None = LEARNER
    reads: Sequence[Field] = (TOKENS, VERSIONS, SCORE)
    writes: Sequence[Field] = (TRAINED,)
    corrects_off_policy: bool = True

    @property
    def uses(self) -> tuple[Model, ...]:
        return (POLICY,)

    @property
    def updates(self) -> Model | None:
        return POLICY

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        return _Trainer(context.shared, self.fails_at)


@dataclass(frozen=True)
class Send(Stage):
    """Sends the version and, with `serves`, makes the sampler use it."""

    serves: bool = True
    name: str = "send"
    shape = "transfer"
    per: Per = "batch"
    reads: Sequence[Field] = (TRAINED,)
    writes: Sequence[Field] = (SERVED,)

    @property
    def uses(self) -> tuple[Model, ...]:
        return (POLICY,)

    def groups(self) -> tuple[WorkerGroup, ...]:
        return (LEARNER, SAMPLER)

    def setup(self, context: StageContext) -> Callable[[Any, Task], Output]:
        def run(rendezvous: Any, task: Task) -> Output:
            if rendezvous.side == "source":
                rendezvous.offer({"version": context.shared.get("trained", 0)})
                return Output()
            version = rendezvous.take()[0]["version"]
            if self.serves:
                context.shared["version"] = version
            return Output(weights=(version, hashlib.sha256(str(version).encode()).hexdigest()))

        return run


def graph(
    schedule: Schedule, *, slow: int = 0, late: int = -1, sieve: bool = False, fails_at: int = -1, serves: bool = True
) -> Graph:
    """Run four groups per step."""
    stages = (Sample(slow, late), Score(), *((Sieve(),) if sieve else ()), Look(), Learn(fails_at), Send(serves))
    return Graph(name="live", source=Count(batch=4), stages=stages, schedule=schedule)
