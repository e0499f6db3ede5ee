"""What the scheduler is told and what it decides. Plain data; knows neither rules nor executors.

Every report of a task carries the task's number; a report whose number is not that of a running task is ignored.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pipeline.declare.task import Task
from pipeline.errors import Problem

STALE = "stale"  # why groups leave that were ready: too old for the next batch
CANCELLED = "cancelled"  # and those that were still being sampled


class Landed(msgspec.Struct, frozen=True):
    """Fields are present for whole groups (or, with no groups, for the step: weights).

    `oldest` has, for the fields of a stage that stamps, the oldest version among the tokens of each group. `task` is
    the number of the task that wrote them, None for a process outside the graph.
    """

    step: int
    groups: tuple[int, ...]
    fields: tuple[str, ...]
    oldest: tuple[int, ...] = ()
    task: int | None = None


class Finished(msgspec.Struct, frozen=True):
    """A task has acknowledged `groups`: it reads them no more, and all that it writes of them has landed.

    A task is over when that holds for all of its groups; one without groups, at once.
    """

    task: Task
    groups: tuple[int, ...]


class Dropped(msgspec.Struct, frozen=True):
    """The gate has dropped groups, each for a reason: no stage behind it will see them."""

    step: int
    reasons: dict[int, str]
    task: int | None = None


class Saved(msgspec.Struct, frozen=True):
    """The checkpoint after `step` is on disk."""

    step: int


class Served(msgspec.Struct, frozen=True):
    """A replica has what a transfer brings, before all of them have: it may sample with it."""

    task: Task
    replica: int


class Failed(msgspec.Struct, frozen=True):
    """An attempt is lost with its worker: what it has not acknowledged is handed out again, as the next attempt."""

    task: Task


class Admit(msgspec.Struct, frozen=True):
    """Groups enter; their keys are minted now."""

    step: int
    groups: tuple[int, ...]


class Claim(msgspec.Struct, frozen=True):
    """These groups, in canonical order, are the batch of the step."""

    step: int
    groups: tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """Hand this task to its replica, or to all workers of its group, which are free for it."""

    task: Task


class Cancel(msgspec.Struct, frozen=True):
    """These groups of a running stream can no longer qualify: it is to give them up and acknowledge them."""

    task: Task
    groups: tuple[int, ...]


class Drop(msgspec.Struct, frozen=True):
    """These groups are ready and too old for `step`, the next batch."""

    step: int
    groups: tuple[int, ...]
    reason: str


class Clear(msgspec.Struct, frozen=True):
    """Nobody will read these groups again."""

    step: int
    groups: tuple[int, ...]


class Save(msgspec.Struct, frozen=True):
    """Write a checkpoint: the weights are those after `step`; `pending`, then those from `next_group` on come next."""

    step: int
    next_group: int
    pending: tuple[int, ...] = ()


class StepDone(msgspec.Struct, frozen=True):
    """Every stage of the step has acknowledged."""

    step: int


class GiveUp(msgspec.Struct, frozen=True):
    """The run cannot go on: `stage` dropped so many groups of `step` that no more may be sampled."""

    stage: str
    step: int
    problem: Problem


Event: TypeAlias = Landed | Finished | Dropped | Saved | Failed | Served
Decision: TypeAlias = Admit | Claim | Run | Cancel | Drop | Clear | Save | StepDone | GiveUp
