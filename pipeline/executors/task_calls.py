"""The calls to actors that carry out one task, until all have returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from pipeline.declare.task import MeetingPlace, Task
from pipeline.errors import SluiceError
from pipeline.executors import merged
from pipeline.executors.outputs import TaskResult
from pipeline.plan.plan import PlannedStage


@dataclass(frozen=True)
class Stream:
    """A running stream: its actor, and whether its reports count."""

    task: Task
    actor: Any
    leads: bool


@dataclass(frozen=True)
class Offer:
    """The source's offer in a transfer, one payload per rank; `carried` for a two-sided transfer."""

    stage: PlannedStage
    task: Task
    near: bool
    carried: bool
    payloads: Sequence[ray.ObjectRef]


@dataclass
class TaskCalls:
    """A running task: calls whose results count, and calls that only must not fail, each with its actor.

    `offer` belongs to a transfer, and `meeting` to a two-sided one. An error caused by a lost peer counts only after
    all calls have returned; in a meeting it is the first one, `error`, which ended it for all.
    """

    task: Task
    leading: dict[ray.ObjectRef, Any]
    others: dict[ray.ObjectRef, Any]
    offer: Offer | None = None
    meeting: MeetingPlace | None = None
    error: SluiceError | None = None
    results: dict[ray.ObjectRef, TaskResult] = field(default_factory=dict)

    def whole(self) -> TaskResult:
        """Return the result of the task. All calls must have returned."""
        result = merged(self.task, [self.results[ref] for ref in self.leading])
        others = [self.results[ref] for ref in self.others]
        result.events = [event for other in others for event in other.events] + result.events
        for other in others:
            result.metrics = other.metrics | result.metrics
            result.error = result.error or other.error
        result.error = self.error or result.error
        return result
