"""A GRPO step whose stages only sleep: schedule and engine without computation, for use on a busy machine.

Every stage sleeps for the given seconds. A group of a rollout takes a lognormal time, drawn from the run's seed and the
group's admission number. Nothing computes, so the measured step does not depend on other load on the machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import Field, Graph, Model, Output, Schedule, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.simulation.distributions import Distribution, Term

PROMPT = Field("prompt", dtype="str")
RESPONSE = Field("response", dtype="str")
VERSIONS = Field("token_versions", dtype="int64", dims="N T", unit="version")
REWARD = Field("reward", dtype="float32")
TRAINED = Field("trained_weights", dtype="weights", dims="", unit="version")
SERVED = Field("served_weights", dtype="weights", dims="", unit="version")
LOOK_S = 0.02  # between two checks of a sleeping group for cancellation
SIZE = 2  # samples per prompt


@dataclass(frozen=True, kw_only=True)
class Numbers(Stage):
    """A source whose prompts are the admission numbers of their groups."""

    batch: int
    name: str = "numbers"
    writes: Sequence[Field] = (PROMPT,)

    def setup(self, context: StageContext) -> Any:
        return lambda columns, task: {PROMPT.name: [str(group) for group in task.groups for _ in range(SIZE)]}


@dataclass(frozen=True, kw_only=True)
class Dream(Stage):
    """A rollout that returns each group when it has slept."""

    on: WorkerGroup
    model: Model
    mean_s: float
    tail: float
    name: str = "rollout"
    shape: Any = "stream"
    per: Any = "group"
    group_size: int = SIZE
    reads: Sequence[Field] = (PROMPT,)
    writes: Sequence[Field] = (RESPONSE, VERSIONS)
    reads_back: Sequence[Field] = (SERVED,)
    stamps: Field = VERSIONS

    @property
    def uses(self) -> tuple[Model, ...]:
        return (self.model,)

    def setup(self, context: StageContext) -> Callable[[dict, Task], AsyncIterator[Output]]:
        import torch

        distribution = Distribution(terms=(Term("lognormal", (self.mean_s, self.tail)),))
        served = context.shared.setdefault("served", [0])

        async def sleep(position: int, group: int) -> Output:
            clock, first = asyncio.get_running_loop().time, served[0]
            delay_s = distribution.draw(groups=1, samples=1, seed=context.seed, counters=(group,))
            until_s = clock() + delay_s
            while (left_s := until_s - clock()) > 0:
                if group in context.cancelled:
                    return Output(cancelled={position: 1 + round(100 * (delay_s - left_s))})
                await asyncio.sleep(min(left_s, LOOK_S))
            length = 2 + round(100 * delay_s)
            versions = torch.full((SIZE * length,), first)
            versions[1::length] = served[0]
            columns: Any = {RESPONSE.name: ["z"] * SIZE, VERSIONS.name: Ragged(versions, (length,) * SIZE)}
            return Output(columns, index=range(position * SIZE, (position + 1) * SIZE))

        async def run(columns: dict, task: Task) -> AsyncIterator[Output]:
            for coming in asyncio.as_completed([sleep(i, group) for i, group in enumerate(task.groups)]):
                yield await coming

        return run


@dataclass(frozen=True, kw_only=True)
class Nap(Stage):
    """Any other stage: sleeps for the whole task and returns zeros."""

    name: str
    seconds: float
    reads: Sequence[Field] = ()
    writes: Sequence[Field] = ()
    per: Any = "sample"
    on: WorkerGroup | None = None
    trains: Model | None = None
    corrects_off_policy: bool = False

    @property
    def uses(self) -> tuple[Model, ...]:
        return (self.trains,) if self.trains else ()

    @property
    def updates(self) -> Model | None:
        return self.trains

    def setup(self, context: StageContext) -> Callable[[dict, Task], Output]:
        import torch

        def run(columns: dict, task: Task) -> Output:
            time.sleep(self.seconds)
            made: Any = {
                field.name: torch.zeros(len(task.groups) * SIZE) for field in self.writes if not field.per_step
            }
            return Output(made, weights=(task.step + 1, "") if self.trains else None)

        return run


@dataclass(frozen=True, kw_only=True)
class Swap(Stage):
    """A refit without weights."""

    model: Model
    source: WorkerGroup
    target: WorkerGroup
    seconds: float
    name: str = "refit"
    shape: Any = "transfer"
    per: Any = "batch"
    reads: Sequence[Field] = (TRAINED,)
    writes: Sequence[Field] = (SERVED,)

    @property
    def uses(self) -> tuple[Model, ...]:
        return (self.model,)

    def groups(self) -> tuple[WorkerGroup, ...]:
        return (self.source, self.target)

    def setup(self, context: StageContext) -> Callable[[Any, Task], Output]:
        def run(rendezvous: Any, task: Task) -> Output:
            if rendezvous.side == "source":
                rendezvous.offer(task.step + 1)
                return Output()
            time.sleep(self.seconds)
            context.shared.setdefault("served", [0])[0] = rendezvous.take()[0]
            return Output(weights=(task.step + 1, f"{task.step + 1:064x}"))

        return run


def graph(
    schedule: Schedule, *, batch: int = 16, mean_s: float = 0.4, tail: float = 0.8, train_s: float = 0.3
) -> Graph:
    """Rollout, reward, training and refit, all sleeping."""
    policy = Model("nobody")
    sampler, learner, judge = WorkerGroup("sampler"), WorkerGroup("learner"), WorkerGroup("judge")
    training: dict[str, Any] = {"on": learner, "trains": policy, "corrects_off_policy": True, "per": "batch"}
    return Graph(
        name="asleep",
        source=Numbers(batch=batch),
        stages=(
            Dream(on=sampler, model=policy, mean_s=mean_s, tail=tail),
            Nap(name="reward", seconds=0.02, reads=(RESPONSE,), writes=(REWARD,), on=judge),
            Nap(name="train", seconds=train_s, reads=(REWARD, VERSIONS), writes=(TRAINED,), **training),
            Swap(model=policy, source=learner, target=sampler, seconds=0.05),
        ),
        schedule=schedule,
    )
