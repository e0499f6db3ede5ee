"""A plan as data: what the planner makes of a graph, and what plan.json holds. Read without networkx."""

from __future__ import annotations

import msgspec

from pipeline.declare.sharding import Sharding


class PlannedStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage as the scheduler sees it. `groups` are worker groups: one, or source and target of a transfer.

    `awaits` are sample fields that it waits for and does not read. `path` counts the stages from it to the weights of
    its step along the longest way, itself included: what has more of them behind it goes first; 0 where no weights
    depend on it. `stamps` is the field in which it says the version of each token.
    """

    name: str
    kind: str
    shape: str
    per: str
    groups: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reads_back: tuple[str, ...]
    uses: tuple[str, ...]
    updates: str | None
    every: int
    first_groups: int | None
    chooses: tuple[str, ...] = ()
    sharding: Sharding | None = None
    layer: int
    where: str
    timeout_s: float | None = None
    awaits: tuple[str, ...] = ()
    run_groups: int | None = None
    stamps: str | None = None
    path: int = 0

    def runs_at(self, step: int, steps: int) -> bool:
        """Whether it runs at `step` of `steps`. Step -1 is before the first."""
        return step < 0 or (step + 1) % self.every == 0 or step == steps - 1


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """One field from its writer to one reader. `back` edges lead to a later step.

    A batch carries `samples x bytes_per_sample`, or, where `ragged` names a dimension, that for each of its entries;
    nothing where the reader only waits for the field.
    """

    field: str
    writer: str
    reader: str
    back: bool
    bytes_per_sample: int
    ragged: str | None


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """`after` at step k waits until `before` has finished at step k - lag."""

    before: str
    after: str
    lag: int
    why: str


class Lifetime(msgspec.Struct, frozen=True, kw_only=True):
    """A field lies in the data plane from its writer until the last of its readers has acknowledged."""

    field: str
    writer: str
    readers: tuple[str, ...]


class PlacedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A worker group and the stages that it hosts. `workers` are its processes, `model_parallel` those of a replica;
    `colocated` is the group whose GPUs it has; `leads` says that a process takes its share of GPU memory at once."""

    name: str
    backend: str
    workers: int
    gpus: int
    cpus: float
    threads: int
    model_parallel: int
    stages: tuple[str, ...]
    colocated: str | None = None
    leads: bool = False

    @property
    def replicas(self) -> int:
        """Workers, or sets of them that hold one model together, that can each take a task of their own."""
        return max(1, self.workers // self.model_parallel)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the scheduler and the executors need to know about a graph.

    `pool` are the stages that run before a group is claimed for a step: none, where batches are fixed as they are
    admitted.
    """

    name: str
    source: str
    batch: int
    group_size: int
    steps: int
    max_staleness: int
    ahead: int
    on_stale: str
    refit: str
    capacity: int
    checkpoint_every: int
    stages: tuple[PlannedStage, ...]
    edges: tuple[Edge, ...]
    fences: tuple[Fence, ...]
    lifetimes: tuple[Lifetime, ...]
    groups: tuple[PlacedGroup, ...]
    weights_fields: tuple[str, ...]
    gate: Gate | None = None
    pool: tuple[str, ...] = ()

    @property
    def layers(self) -> list[list[PlannedStage]]:
        """Stages that may run at the same time, in order of dependence."""
        depth = max((stage.layer for stage in self.stages), default=-1) + 1
        return [[stage for stage in self.stages if stage.layer == layer] for layer in range(depth)]

    @property
    def gpus(self) -> int:
        """GPUs of all worker groups together."""
        return sum(group.gpus for group in self.groups if group.colocated is None)

    def partners(self, name: str) -> tuple[str, ...]:
        """The other worker groups that lie on the same GPUs as this one, which takes turns with them."""
        home = {group.name: group.colocated or group.name for group in self.groups}
        return tuple(other for other in home if other != name and home[other] == home[name])

    @property
    def partition(self) -> str:
        """The data plane partition of the graph's samples."""
        return self.name

    def stage(self, name: str) -> PlannedStage:
        """Raises KeyError for a stage that the plan does not have."""
        return {stage.name: stage for stage in self.stages}[name]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """Stage `stage` writes `field` for the groups that it keeps; at most `max_groups` are admitted for one step."""

    stage: str
    field: str
    max_groups: int
