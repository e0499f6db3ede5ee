"""Events and decisions of the scheduler. Plain data; knows neither rules nor executors.

Every report carries its task's number; reports of tasks that are not running are ignored.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pipeline.declare.task import Task
from pipeline.errors import Problem

STALE = "stale"  # why ready groups are dropped: too old for the next batch
CANCELLED = "cancelled"  # the same for groups that were still being sampled


class Landed(msgspec.Struct, frozen=True):
    """Fields are present for whole groups (or, with no groups, for the step: weights).

    `oldest` has the oldest token version of each group, if the stage stamps tokens. `task` is the number of the task
    that wrote the fields, None for an external process. `group_bytes` has the bytes of each field in the group that has
    most of it, if known.
    """

    step: int
    groups: tuple[int, ...]
    fields: tuple[str, ...]
    oldest: tuple[int, ...] = ()
    task: int | None = None
    group_bytes: tuple[int, ...] = ()


class Finished(msgspec.Struct, frozen=True):
    """A task has acknowledged `groups`: it has finished reading them, and all its output for them has landed.

    A task is over once it has acknowledged all its groups; a task without groups, at once.
    """

    task: Task
    groups: tuple[int, ...]


class GroupsDropped(msgspec.Struct, frozen=True):
    """The gate has dropped groups, each with a reason; later stages will not see them."""

    step: int
    reasons: dict[int, str]
    task: int | None = None


class Saved(msgspec.Struct, frozen=True):
    """The checkpoint after `step` is on disk."""

    step: int


class ReplicaServed(msgspec.Struct, frozen=True):
    """A replica has the version of a transfer before all of them have; it may sample with it."""

    task: Task
    replica: int


class AttemptLost(msgspec.Struct, frozen=True):
    """An attempt was lost with its worker: unacknowledged groups are submitted again as the next attempt."""

    task: Task


class Admit(msgspec.Struct, frozen=True):
    """Admit groups; their keys are minted now."""

    step: int
    groups: tuple[int, ...]


class Claim(msgspec.Struct, frozen=True):
    """These groups, in canonical order, form the batch of the step."""

    step: int
    groups: tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """Submit this task to its replica, or to all workers of its group; they are free."""

    task: Task


class Cancel(msgspec.Struct, frozen=True):
    """These groups of a running stream are too old: it should cancel and acknowledge them."""

    task: Task
    groups: tuple[int, ...]


class Drop(msgspec.Struct, frozen=True):
    """These groups are ready but too old for `step`, the next batch."""

    step: int
    groups: tuple[int, ...]
    reason: str


class Clear(msgspec.Struct, frozen=True):
    """These partitions have no remaining reader of these groups; with `last`, no partition has."""

    step: int
    groups: tuple[int, ...]
    partitions: tuple[str, ...]
    last: bool


class Save(msgspec.Struct, frozen=True):
    """Write a checkpoint with the weights after `step`. `pending` groups come next, then those from `next_group`."""

    step: int
    next_group: int
    pending: tuple[int, ...] = ()


class StepDone(msgspec.Struct, frozen=True):
    """Every stage of the step has acknowledged."""

    step: int


class GiveUp(msgspec.Struct, frozen=True):
    """The run cannot continue: `stage` dropped so many groups of `step` that the sampling limit is reached."""

    stage: str
    step: int
    problem: Problem


Event: TypeAlias = Landed | Finished | GroupsDropped | Saved | AttemptLost | ReplicaServed
Decision: TypeAlias = Admit | Claim | Run | Cancel | Drop | Clear | Save | StepDone | GiveUp
