"""What a stage receives when it runs, and what it returns: `Task`, `Output`, `StageContext`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import msgspec

from pipeline.declare.columns import Columns
from pipeline.declare.ranks import Ranks
from pipeline.declare.sharding import Shard
from pipeline.declare.times import SampleTimes

if TYPE_CHECKING:
    from pipeline.declare.group import WorkerGroup


Per = Literal["sample", "group", "batch"]
Shape = Literal["map", "stream", "transfer", "external"]
SHAPES: tuple[Shape, ...] = get_args(Shape)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One stage on one handle. `groups` are admission numbers in canonical order; `attempt` counts retries.

    `number` is the task's unique serial number in the run; every attempt has its own. `replica` is the data-parallel
    worker that runs it, or None if the whole group does. `version` is the policy version published when the task was
    submitted. `shard` is a rank's part of the batch for a stage with `sharding`: its columns are those of
    `shard.index`, in that order.
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
    """The return value of a runner that returns more than columns.

    `columns` may also be a TensorDict (see `pipeline.data_plane.tensordicts`). `metrics` are numbers named without
    the stage (stage `reward` and `mean` give `reward/mean`); a name with a slash stays as it is, and must not begin
    with another stage's name. A batch's metrics are the mean over its tasks, weighted by samples. `index` names the
    samples of the task that these columns belong to, in any order; None means all. Only a stream returns its
    samples in parts: whole groups, each once. It may use a buffer again: what it yields is copied. `weights` is the
    acknowledged (version, sha256) of a stage that writes weights. `dropped`, from a stage with a gate, maps
    positions in `task.groups` to the reason for dropping; the columns then cover the other groups. `cancelled`,
    from a stream, maps positions of canceled groups (see `StageContext.cancelled`) to the length of their longest
    sample in tokens. `times` says how the time of samples was spent, by their position in the task, of whole groups;
    a task without groups, as of Evaluate, gives those of its own samples. It is recorded and shown. `at_once` is how
    many samples of this worker are at most in a part of that name at the same time. `open`, from a stream, counts the
    samples of all its tasks on this worker that are not finished, by the part of their time that they are in; an output
    may have nothing else. The last count is shown while tasks run.
    """

    columns: Columns = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    index: Sequence[int] | None = None
    weights: tuple[int, str] | None = None
    dropped: Mapping[int, str] = field(default_factory=dict)
    cancelled: Mapping[int, int] = field(default_factory=dict)
    times: Mapping[int, SampleTimes] = field(default_factory=dict)
    at_once: Mapping[str, int] = field(default_factory=dict)
    open: Mapping[str, int] | None = None


class MeetingPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where workers of both sides of a transfer meet: a key-value store (torch's TCPStore) that the executor serves at
    `host` and `port`.

    `name` identifies exactly these processes; a replacement worker changes it. If one of them is lost, the store has
    the reason under that name. `targets` are the participating ranks of the target. No wait exceeds `deadline_s`.
    """

    host: str
    port: int
    name: str
    targets: tuple[int, ...]
    deadline_s: float


class Rendezvous(Protocol):
    """Where the two sides of a transfer meet. The executor makes one for each transfer.

    `is_near` is True if both are on one machine, so the payload may be a memory handle. `meeting` is set if both sides
    move the transfer together.
    """

    side: Literal["source", "carrier", "target"]
    is_near: bool
    meeting: MeetingPlace | None

    def offer(self, payload: Any) -> None:
        """Offer this rank's payload (source)."""

    def take(self) -> list[Any]:
        """Return the payloads of all source ranks (target, carrier). Do not write to arrays: they may be shared."""


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker listens for those that it serves; a connection first proves that it knows the key."""

    host: str
    port: int
    key: bytes


@dataclass
class StageContext:
    """The argument of `Stage.setup`, from the worker that runs it.

    `shared` lives as long as the worker and is common to all its stages; it holds their backend. Its values may have
    `close()`, called at the end, and, in groups that share GPUs, `sleep(room)` and `wake()`, see
    `pipeline.declare.held`. `group_size` is the number of samples per prompt in this graph, `steps` and `max_staleness`
    are those of the schedule; `run_dir` is None if nothing is recorded. `ranks` are the worker's peers in its group.
    `cancelled` holds the admission numbers of canceled groups; a stream checks it between two tokens. `in_turns` is
    true if other groups compute on the same GPUs, in turns, and keep `beside_bytes` of each, as far as that is known.
    `servers` has where each worker of the group that serves this stage listens (see `HasServer`, in
    `pipeline.declare.abilities`), from the first task on. It changes when one is replaced, and is empty outside a run.
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
    in_turns: bool = False
    beside_bytes: float = 0.0
    max_staleness: int = 0
    servers: list[ServerAddress] = field(default_factory=list)
