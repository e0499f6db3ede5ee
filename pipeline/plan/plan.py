"""A plan as data: the output of the planner and the content of plan.json. Does not need networkx."""

from __future__ import annotations

from collections.abc import Container, Iterator

import msgspec

from pipeline.declare.sharding import Sharding

ADDED = "samples"  # the stage that every plan adds: it follows a gate, but does not justify one


class PlannedStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage as the scheduler sees it. `groups` are worker groups: one, or source and target of a transfer.

    `awaits` are sample fields that it waits for and does not read. `path` is the number of stages on the longest path
    from it to the weights of its step, itself included; longer paths get workers first; 0 if no weights depend on it.
    `stamps` is the field in which it writes the version of each token.
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
        """Return whether it runs at `step` of `steps`. Step -1 is before the first."""
        return step < 0 or (step + 1) % self.every == 0 or step == steps - 1


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """One field from its writer to one reader. `back` edges lead to a later step.

    `bytes_per_sample` counts per sample, or, if `ragged` names a dimension, per entry of that dimension; it is 0 if the
    reader only waits for the field.
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
    """A field, its writer, and all of its readers."""

    field: str
    writer: str
    readers: tuple[str, ...]


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """The sample fields with the same last readers: a partition of the data plane, cleared when those have finished.

    A group's rows of it are cleared once every one of `holders`, the stages that read or write one of the fields, has
    acknowledged the group; without holders, with the group's last rows. `group_bytes` has the most bytes of a group per
    field, None if the plan cannot tell.
    """

    name: str
    fields: tuple[str, ...]
    last_readers: tuple[str, ...]
    holders: tuple[str, ...]
    group_bytes: tuple[int | None, ...]

    @property
    def most_bytes(self) -> int:
        """The most bytes of a group in all fields whose size the plan knows."""
        return sum(most or 0 for most in self.group_bytes)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The fields whose size the plan cannot tell: texts, and ragged ones without a limit."""
        return tuple(field for field, most in zip(self.fields, self.group_bytes) if most is None)


class PlacedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A worker group and its stages. `workers` is the number of processes, `model_parallel` that of one replica;
    `colocated` is the group whose GPUs it shares; `leads`: each process allocates its share of GPU memory at once.
    `python` is the absolute path of its interpreter, if it is not the driver's. A group that `serves` stages runs none.
    """

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
    python: str | None = None
    serves: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """The number of workers, or of sets of workers that hold one model together; each runs its own tasks."""
        return max(1, self.workers // self.model_parallel)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the scheduler and the executors need to know about a graph.

    `pool` are the stages that run before a group is claimed for a step; none if batches are fixed at admission.
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
    gate: PlannedGate | None = None
    pool: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] = ()
    capacity_bytes: int | None = None
    servers: tuple[PlacedGroup, ...] = ()

    @property
    def drops_stale(self) -> bool:
        """Whether groups that would be too old are dropped, so that a batch need not wait for them."""
        return self.on_stale == "drop" and self.max_staleness > 0

    @property
    def placed(self) -> tuple[PlacedGroup, ...]:
        """All groups that have workers: those that run stages, and those that serve them."""
        return (*self.groups, *self.servers)

    @property
    def layers(self) -> list[list[PlannedStage]]:
        """Stages that may run at the same time, in order of dependence."""
        depth = max((stage.layer for stage in self.stages), default=-1) + 1
        return [[stage for stage in self.stages if stage.layer == layer] for layer in range(depth)]

    @property
    def gpus(self) -> int:
        """The number of GPUs of all worker groups together."""
        return sum(group.gpus for group in self.groups if group.colocated is None)

    def loading(self, names: Container[str]) -> str:
        """Say what these worker groups load when they start: `sampler (vllm, Qwen3-0.6B), learner (torch)`."""
        return ", ".join(
            f"{group.name} ({', '.join(self._loads(group))})" for group in self.placed if group.name in names
        )

    def _loads(self, group: PlacedGroup) -> Iterator[str]:
        yield group.backend
        models = (model for stage in self.stages if group.name in stage.groups for model in stage.uses)
        yield from dict.fromkeys(model.rpartition("/")[2] for model in models)

    def partners(self, name: str) -> tuple[str, ...]:
        """Return the other worker groups on the same GPUs, which take turns with this one."""
        home = {group.name: group.colocated or group.name for group in self.placed}
        return tuple(other for other in home if other != name and home[other] == home[name])

    @property
    def partition(self) -> str:
        """The prefix of the data plane partitions of the graph's samples."""
        return self.name

    def stage(self, name: str) -> PlannedStage:
        """Return the stage of this name. Raises KeyError if there is none."""
        return {stage.name: stage for stage in self.stages}[name]


class PlannedGate(msgspec.Struct, frozen=True, kw_only=True):
    """Stage `stage` writes `field` for the groups that it keeps; at most `max_groups` are admitted per step, and of
    those at most the fraction `most_faults` dropped for reasons that begin with `fault`, if that is not empty."""

    stage: str
    field: str
    max_groups: int
    fault: str = ""
    most_faults: float = 1.0
