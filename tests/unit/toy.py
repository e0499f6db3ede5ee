"""A graph of simple stages without tensors, for tests of the plan and the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline import Field, Graph, Model, Schedule, Stage, WorkerGroup
from pipeline.declare.sharding import Sharding
from pipeline.declare.stage import Gate

PROMPT = Field("prompt", dtype="str")
RESPONSE = Field("response", dtype="str")
REWARD = Field("reward", dtype="float32")
LOGPROBS = Field("logprobs", dtype="float32", dims="N T", unit="nat")
VERSIONS = Field("token_versions", dtype="int64", dims="N T", unit="version")
REF = Field("ref_logprobs", dtype="float32", dims="N T", unit="nat")
TRAINED = Field("trained_weights", dtype="weights", dims="", unit="version")
SERVED = Field("served_weights", dtype="weights", dims="", unit="version")

SAMPLER = WorkerGroup("sampler", backend="torch")
LEARNER = WorkerGroup("learner", backend="torch")
POLICY = Model("policy")


@dataclass(frozen=True)
class Toy(Stage):
    """A stage that declares what it reads and writes and does nothing."""

    name: str
    reads: Sequence[Field] = ()
    writes: Sequence[Field] = ()
    reads_back: Sequence[Field] = ()
    per: str = "sample"
    on: WorkerGroup | None = None
    to: WorkerGroup | None = None
    batch: int = 4
    group_size: int | None = None
    every: int = 1
    models: tuple[Model, ...] = ()
    trains: Model | None = None
    corrects_off_policy: bool = False
    gate: Field | Gate | None = None
    max_rounds: int = 10
    run_samples: int | None = None
    stamps: Field | None = None
    sharding: Sharding | None = None
    shape: str = "map"
    found: list = field(default_factory=list, hash=False)

    def __post_init__(self):
        if isinstance(self.gate, Field):
            object.__setattr__(self, "gate", Gate(self.gate, self.max_rounds))

    @property
    def uses(self):
        return self.models

    @property
    def updates(self):
        return self.trains

    def groups(self):
        return tuple(group for group in (self.on, self.to) if group)

    def check(self, graph):
        return self.found

    def setup(self, context):
        return lambda columns, task: {}


def stages(**changes: dict) -> dict[str, Toy]:
    """Return the stages of a small GRPO step by name. `changes` replace stage parameters; None removes a stage."""
    toys = {
        "rollout": dict(
            reads=(PROMPT,), writes=(RESPONSE,), reads_back=(SERVED,), per="group", on=SAMPLER, group_size=2,
            models=(POLICY,),
        ),
        "reward": dict(reads=(PROMPT, RESPONSE), writes=(REWARD,)),
        "logprobs": dict(reads=(RESPONSE,), writes=(LOGPROBS,), per="batch", on=LEARNER, models=(POLICY,)),
        "train": dict(
            reads=(REWARD, LOGPROBS), writes=(TRAINED,), per="batch", on=LEARNER, models=(POLICY,), trains=POLICY,
        ),
        "refit": dict(
            reads=(TRAINED,), writes=(SERVED,), per="batch", shape="transfer", on=LEARNER, to=SAMPLER, models=(POLICY,),
        ),
        "evaluate": dict(reads=(SERVED,), per="batch", on=SAMPLER, every=2, models=(POLICY,)),
    }  # fmt: skip
    for name, change in changes.items():
        if change is None:
            del toys[name]
        else:
            toys[name] = toys.get(name, {}) | change
    return {name: Toy(name, **toy) for name, toy in toys.items()}


def graph(*, batch: int = 4, schedule: Schedule | None = None, source: Stage | None = None, **changes: dict) -> Graph:
    """Return a graph of the toy stages."""
    return Graph(
        name="toy",
        source=source or Toy("prompts", writes=(PROMPT,), batch=batch),
        stages=tuple(stages(**changes).values()),
        schedule=schedule or Schedule(steps=3),
    )


def streaming(
    *, sampler: int = 1, learner: int = 1, run_groups: int | None = None, **changes: dict | None
) -> dict[str, dict | None]:
    """Return the changes that make the toys asynchronous.

    Rollout streams and stamps versions, logprobs are frozen, worker groups have this many replicas, and training is
    divided over all replicas of the learner."""
    runs = run_groups and 2 * run_groups  # each group has two samples
    on, to = (
        WorkerGroup("learner", backend="torch", workers=learner),
        WorkerGroup("sampler", backend="torch", workers=sampler),
    )
    made: dict[str, dict | None] = {
        "rollout": dict(shape="stream", writes=(RESPONSE, VERSIONS), stamps=VERSIONS, on=to),
        "logprobs": dict(on=on, run_samples=runs),
        "ref": dict(reads=(RESPONSE,), writes=(REF,), per="batch", on=on, run_samples=runs),
        "train": dict(
            reads=(REWARD, LOGPROBS, REF, VERSIONS),
            on=on,
            sharding=Sharding(lengths=("T", "T")) if learner > 1 else None,
            corrects_off_policy=True,
        ),
        "refit": dict(on=on, to=to),
        "evaluate": dict(on=to),
    }
    for name, change in changes.items():
        made[name] = change if change is None else made.get(name, {}) | change
    return made
