"""What a stage is given when it runs, and what it returns: `Task`, `Output`, `StageContext`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from pipeline.declare.columns import Columns
from pipeline.declare.ranks import Ranks
from pipeline.declare.sharding import Shard

if TYPE_CHECKING:
    from pipeline.declare.group import WorkerGroup


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
