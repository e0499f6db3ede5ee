"""A stage: what it reads, what it writes, on which workers, and the code that turns one into the other.

A `Stage` is a frozen description. It loads neither torch nor ray; `setup` runs once in each worker that hosts
it and returns the runner, which does the work. The runner gets exactly the columns that the stage reads and returns
exactly those that it writes, so it is tested with a dict and no engine at all:

    @dataclass(frozen=True)
    class Shout(Stage):
        reads = (RESPONSE,)
        writes = (Field("shout", dtype="str"),)

        def setup(self, context):
            return lambda columns, task: {"shout": [text.upper() for text in columns["response"]]}

Three shapes. *map*: `runner(columns, task)` returns the columns, or an `Output` that adds metrics. *stream*:
`runner(columns, task)` is an async generator of `Output`s, each for whole groups of samples, which its `index` names;
other tasks of its worker, and the swap of weights, run while it awaits. *transfer*: `runner(rendezvous, task)` runs on
two worker groups, first with `rendezvous.side == "source"`, which offers something, and then with `"target"`, which
takes it and returns an `Output`. Where the stage `meets`, the source runs once more, with `"carrier"`, at the same time
as the target: both then move it together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from pipeline.columns import Columns
from pipeline.errors import Problem, StageError
from pipeline.fields import Field
from pipeline.ranks import Ranks
from pipeline.sharding import Shard, Sharding

if TYPE_CHECKING:
    from pipeline.graph import Graph, Model, WorkerGroup

Per = Literal["sample", "group", "batch"]
Shape = Literal["map", "stream", "transfer", "external"]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One stage on one handle. `groups` are admission numbers in canonical order; `attempt` counts retries.

    `number` is the task's serial number in its run, which no other attempt has. `replica` is the data-parallel worker
    that it was given to, None where all of the group run it together. `version` is the policy version that was
    published when the task was handed out. `shard` is the share of the batch that a rank has of a stage with
    `sharding`: its columns are those of `shard.index`, in that order.
    """

    stage: str
    step: int
    groups: tuple[int, ...] = ()
    attempt: int = 0
    version: int = 0
    number: int = 0
    replica: int | None = None
    shard: Shard | None = None


@dataclass
class Output:
    """What a runner returns when it has more to say than columns.

    `metrics` are numbers, named without the stage (`reward/mean` comes from the stage `reward` and `mean`, unless the
    name has a slash already); a batch's metrics are the mean over its tasks, weighted by samples. `index` names the
    samples of the task that these columns are for (all of them where it is None). `weights` is the acknowledged
    (version, sha256) of a stage that writes weights. `dropped`, of a stage with a gate, says for groups by their
    position in `task.groups` why they are dropped; the columns are then those of the other groups. `cancelled`, of a
    stream, says for groups by their position that it gave them up, as `StageContext.cancelled` asks, and how many
    tokens the longest of their samples had.
    """

    columns: Columns = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    index: Sequence[int] | None = None
    weights: tuple[int, str] | None = None
    dropped: Mapping[int, str] = field(default_factory=dict)
    cancelled: Mapping[int, int] = field(default_factory=dict)


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where workers of both sides of a transfer meet, to exchange something among themselves: a key-value store
    (torch's TCPStore) that the executor serves at `host` and `port`.

    `name` stands for exactly these processes: a worker that takes another one's place makes another name. When one of
    them is lost, the store has the reason under that name. `targets` are the ranks of the target that take part. No
    wait takes longer than `deadline_s`.
    """

    host: str
    port: int
    name: str
    targets: tuple[int, ...]
    deadline_s: float


class Rendezvous(Protocol):
    """Where the two sides of a transfer meet. The executor makes one for each transfer.

    `is_near` says that both are on one machine, so that what is offered may be a handle to memory there. `meeting` is
    there where both sides carry the transfer out together.
    """

    side: Literal["source", "carrier", "target"]
    is_near: bool
    meeting: Meeting | None

    def offer(self, payload: Any) -> None:
        """Source: hand this rank's payload to the others."""

    def take(self) -> list[Any]:
        """Target and carrier: the payloads of all ranks of the source. Arrays may be shared memory: read, do not write
        them."""


@dataclass
class StageContext:
    """What a worker gives to `Stage.setup`.

    `shared` lives as long as the worker and is common to all stages on it: the backend that they share is kept there.
    What is in it may have `close()`, called at the end, and, for groups that share GPUs, `sleep(room)` and `wake()`,
    which give memory away, all or until `room` bytes are free, and take it again, and return the bytes that are in use
    on the GPU then.
    `group_size` is the number of samples a prompt in this graph, `steps` those of the schedule; `run_dir` is None where
    nothing is recorded. `ranks` are the worker's peers in its group. `cancelled` holds admission numbers of groups that
    nobody wants any more: a stream looks there between two tokens.
    """

    group: WorkerGroup
    rank: int
    seed: int
    group_size: int
    run_dir: Path | None
    shared: dict[Any, Any]
    steps: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    cancelled: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Location:
    """Where in the user's file a description was written."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller(depth: int) -> Location:
    """The location of the code `depth` frames above the caller of this function; `dataclasses` is passed over."""
    frame = sys._getframe(depth + 1)
    while frame.f_globals.get("__name__") == "dataclasses" and frame.f_back:  # the caller of replace() is meant
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno)


class Stage:
    """Base of all stages. Subclasses are frozen dataclasses; what they leave out has the value below.

    name        of the stage in this graph; the class's name in lower case unless given
    reads       the fields it reads, all at the same step
    writes      the fields it writes; no other stage writes them
    reads_back  the fields of an *earlier* step that it waits for (rollout: the served weights)
    per         what it can start on: each sample, each group, or only the whole batch
    run_samples  of a stage per batch: it starts on runs of so many samples, rounded up to whole groups, in canonical
                order, each as soon as all of it is there; None is the whole batch at once
    stamps      the field, among those it writes, that says for each token which policy version sampled it
    uses        the models whose weights it reads while it runs
    updates     the model whose weights it changes, if any
    on          the worker group it runs on; None is the graph's host group
    group_size  samples it makes of each prompt (rollout), else None
    every       it runs at every n-th step, counted from 1, and at the last; 1 is every step
    first_groups  groups of a batch whose columns it gets: the first, or those that it `choose`s; None is all
    chooses     fields, among those it reads, by which it chooses them; none are the first
    shows       ragged fields, among those it writes, that are kept with the samples of a run for whoever looks
    sharding    how its batch is divided over the data-parallel workers of its group, which then run it together; None
                is on one worker
    gate        the field, among those it writes, that it writes only for the groups that it keeps: the stages that it
                does not depend on see no other groups, and what it drops is sampled anew; None drops nothing
    max_rounds  with a gate: batches of groups that are sampled for one step at most
    hints       for a field that it reads, what to write where no stage writes it; a general text for those left out
    corrects_off_policy   whether it corrects for samples of an older policy, which max_staleness > 0 needs
    """

    name: str = ""
    reads: Sequence[Field] = ()
    writes: Sequence[Field] = ()
    reads_back: Sequence[Field] = ()
    per: Per = "sample"
    run_samples: int | None = None
    stamps: Field | None = None
    shape: ClassVar[Shape] = "map"
    on: WorkerGroup | None = None
    group_size: int | None = None
    every: int = 1
    first_groups: int | None = None
    chooses: Sequence[Field] = ()
    shows: Sequence[Field] = ()
    sharding: Sharding | None = None
    gate: Field | None = None
    max_rounds: int = 10
    corrects_off_policy: bool = False
    hints: Mapping[str, str] = {}
    location: Location

    def __new__(cls, *args: Any, **kwargs: Any) -> Stage:
        self = super().__new__(cls)
        object.__setattr__(self, "location", caller(1))
        if not cls.name:
            object.__setattr__(self, "name", cls.__name__.lower())
        return self

    @property
    def uses(self) -> tuple[Model, ...]:
        """The models whose weights the stage reads while it runs."""
        return ()

    @property
    def updates(self) -> Model | None:
        """The model whose weights the stage changes."""
        return None

    def groups(self) -> tuple[WorkerGroup, ...]:
        """The worker groups it runs on: one, or source and target of a transfer; empty means the host group."""
        return (self.on,) if self.on else ()

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Problems of this stage in this graph, beyond those that every stage is checked for. Loads no torch."""
        return ()

    def choose(self, columns: Columns, group_size: int) -> Sequence[int]:
        """Of a stage that `chooses`: which groups it wants, by their place in the batch, of which these are the columns
        of all samples. No more than `first_groups`."""
        return ()

    def meets(self, is_near: bool) -> bool:
        """Of a transfer: whether both sides carry it out together. `is_near` says that all workers of both are on one
        machine. Raises StageError where it cannot be done at all."""
        return False

    def setup(self, context: StageContext) -> Callable[..., Any]:
        """Runs once in each worker. Returns the runner; one that has `save(folder)` and `restore(folder)` is part
        of every checkpoint."""
        raise StageError(
            Problem(
                where=str(self.location),
                what=f"stage {self.name!r} ({type(self).__name__}) does not define setup()",
                why="it returns the runner, which does the work",
                fix="def setup(self, context): return lambda columns, task: {...}",
            )
        )

    def vocabulary(self, context: StageContext) -> Sequence[bytes]:
        """Of a stage that `shows` tokens: what each adds to a text, as UTF-8, by its id. Asked once, after `setup`."""
        return ()


@dataclass(frozen=True)
class External(Stage):
    """Fields that a process outside the graph writes straight into the data plane.

    Nothing runs for it. The store is asked once a second; `timeout_s` after the batch was admitted, a field that has
    not arrived ends the run with an error that names it.
    """

    fields: tuple[Field, ...]
    name: str = "external"
    timeout_s: float = 600.0
    shape: ClassVar[Shape] = "external"

    @property
    def writes(self) -> Sequence[Field]:  # type: ignore[override]
        return self.fields
