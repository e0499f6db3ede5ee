"""A graph that samples, learns and publishes without a model: only its timing is real. Loaded by path, as users' are.

The admission number of a group determines how many tokens it takes; each token is stamped with the version served at
that moment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline import Field, Graph, Model, Output, Schedule, Stage, StageContext, Task, WorkerGroup

PROMPT = Field("prompt", dtype="str")
TOKENS = Field("tokens", dtype="int64", dims="N T", unit="id")
VERSIONS = Field("versions", dtype="int32", dims="N T", unit="version")
SCORE = Field("score", dtype="float32")
TRAINED = Field("trained_weights", dtype="weights", dims="", unit="version")
SERVED = Field("served_weights", dtype="weights", dims="", unit="version")
POLICY = Model("policy")
SAMPLER = WorkerGroup("sampler", backend="torch")
LEARNER = WorkerGroup("learner", backend="torch")


@dataclass(frozen=True)
class Numbers(Stage):
    """A source whose prompts are the group numbers."""

    batch: int
    name: str = "numbers"
    per: str = "group"
    writes: Sequence[Field] = (PROMPT,)

    def setup(self, context: StageContext) -> Any:
        return lambda columns, task: {"prompt": [str(g) for g in task.groups for _ in range(context.group_size)]}


@dataclass(frozen=True)
class Samples(Stage):
    """Samples groups of two; subclasses define the tokens and the timing."""

    name: str = "sample"
    per: str = "group"
    group_size: int = 2
    on: WorkerGroup | None = SAMPLER
    reads: Sequence[Field] = (PROMPT,)
    reads_back: Sequence[Field] = (SERVED,)
    writes: Sequence[Field] = (TOKENS, VERSIONS)
    stamps: Field | None = VERSIONS

    @property
    def uses(self) -> tuple[Model, ...]:
        return (POLICY,)


@dataclass(frozen=True, kw_only=True)
class Sample(Samples):
    """One token every `token_s` seconds; one group in ten has `tail` times as many."""

    token_s: float
    tail: int
    shape: str = "stream"

    def length(self, group: int) -> int:
        """Return the number of tokens per sample of a group."""
        draw = random.Random(group)
        return draw.randint(1, 4) * (self.tail if draw.random() < 0.1 else 1)

    def setup(self, context: StageContext) -> Any:
        import torch

        from pipeline.declare.columns import Ragged

        async def run(columns: dict, task: Task) -> Any:
            made: dict[int, list[int]] = {position: [] for position in range(len(task.groups))}
            while made:
                done = []
                for position, versions in made.items():
                    group = task.groups[position]
                    if group in context.cancelled:
                        yield Output(cancelled={position: len(versions)})
                        done.append(position)
                        continue
                    versions.append(context.shared["version"])
                    if len(versions) == self.length(group):
                        size = context.group_size
                        stamps = torch.tensor(versions * size, dtype=torch.int32)
                        lengths = (len(versions),) * size
                        index = range(position * size, (position + 1) * size)
                        columns = {
                            "tokens": Ragged(torch.full((len(stamps),), group), lengths),
                            "versions": Ragged(stamps, lengths),
                        }
                        yield Output(columns, index=index)
                        done.append(position)
                for position in done:
                    del made[position]
                await asyncio.sleep(self.token_s)

        return run


@dataclass(frozen=True)
class Score(Stage):
    """The number of tokens, negated."""

    name: str = "score"
    reads: Sequence[Field] = (TOKENS,)
    writes: Sequence[Field] = (SCORE,)

    def setup(self, context: StageContext) -> Any:
        import torch

        return lambda columns, task: {"score": -torch.tensor(columns["tokens"].lengths, dtype=torch.float32)}


@dataclass(frozen=True)
class Learn(Stage):
    """Spends `learn_s` seconds on a batch."""

    learn_s: float
    name: str = "learn"
    per: str = "batch"
    on: WorkerGroup | None = LEARNER
    reads: Sequence[Field] = (TOKENS, VERSIONS, SCORE)
    writes: Sequence[Field] = (TRAINED,)
    corrects_off_policy: bool = True

    @property
    def uses(self) -> tuple[Model, ...]:
        return (POLICY,)

    @property
    def updates(self) -> Model:
        return POLICY

    def setup(self, context: StageContext) -> Any:
        import time

        def run(columns: dict, task: Task) -> Output:
            time.sleep(self.learn_s)
            ages = task.step - columns["versions"].values
            metrics = {"age": float(ages.float().mean()), "oldest": float(ages.max()), "youngest": float(ages.min())}
            return Output(metrics=metrics, weights=(task.step + 1, ""))

        return run


@dataclass(frozen=True)
class Publish(Stage):
    """Sends the version number."""

    name: str = "publish"
    per: str = "batch"
    shape: str = "transfer"
    reads: Sequence[Field] = (TRAINED,)
    writes: Sequence[Field] = (SERVED,)

    @property
    def uses(self) -> tuple[Model, ...]:
        return (POLICY,)

    def groups(self) -> tuple[WorkerGroup, ...]:
        return (LEARNER, SAMPLER)

    def setup(self, context: StageContext) -> Any:
        import hashlib

        def run(rendezvous: Any, task: Task) -> Output:
            if rendezvous.side == "source":
                rendezvous.offer(task.step + 1)
                return Output()
            context.shared["version"] = version = rendezvous.take()[0]
            return Output(weights=(version, hashlib.sha256(str(version).encode()).hexdigest()))

        return run


def graph(
    steps: int = 5,
    batch: int = 4,
    max_staleness: int = 0,
    pipeline_depth: int = 8,
    on_stale: Literal["wait", "drop"] = "wait",
    refit: Literal["drain", "in_flight"] = "drain",
    checkpoint_every: int = 0,
    token_s: float = 0.0,
    learn_s: float = 0.0,
    tail: int = 10,
) -> Graph:
    """Sample, score, learn from and publish numbers."""
    return Graph(
        name="numbers",
        source=Numbers(batch),
        stages=(Sample(token_s=token_s, tail=tail), Score(), Learn(learn_s), Publish()),
        schedule=Schedule(
            steps=steps,
            max_staleness=max_staleness,
            pipeline_depth=min(pipeline_depth, max_staleness),
            on_stale=on_stale,
            refit=refit,
            checkpoint_every=checkpoint_every,
            keep_groups=0,
        ),
    )
