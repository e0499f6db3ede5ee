"""Which of the colocated worker groups is awake. The scheduler guarantees that only one of them has tasks."""

from __future__ import annotations

from typing import Protocol

from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record.trace import Turned

SLACK_BYTES = 256 << 20  # memory that is allocated again is fragmented differently


class WakeOrSleep(Protocol):
    """Wakes every worker of a group (True), or puts it to sleep until `room` bytes of each GPU are free; None frees as
    much as possible."""

    def __call__(self, name: str, awake: bool, room: int | None) -> list[Turned]: ...


class Turns:
    """`call` wakes or suspends a group and returns the workers' reports. All groups start awake.

    A backend that leads takes a fixed amount of memory when it wakes, measured when it first sleeps: from then on its
    one partner keeps the rest. Every other group gets everything.
    """

    def __init__(self, plan: Plan, call: WakeOrSleep) -> None:
        self._partners = {group.name: plan.partners(group.name) for group in plan.groups}
        self._fixed = {group.name for group in plan.groups if group.leads}
        self._call = call
        self._asleep: set[str] = set()
        self._takes: dict[str, int] = {}  # bytes, by group
        self._events: list[Turned] = []

    def before(self, stage: PlannedStage) -> None:
        """A task of this stage is about to start. If its group (of a transfer: the target) computes on shared GPUs, the
        other groups there release their memory."""
        if stage.uses or stage.updates:
            self._to(stage.groups[-1])

    def _to(self, name: str) -> None:
        partners = self._partners[name]
        for partner in partners:
            if partner not in self._asleep:
                self._asleep.add(partner)
                self._turn(partner, False, self._takes.get(name) if len(partners) == 1 else None)
        if name in self._asleep:
            self._asleep.remove(name)
            self._turn(name, True, None)

    def _turn(self, name: str, awake: bool, room: int | None) -> None:
        events = self._call(name, awake, room)
        given = max((event.before_bytes - event.memory_bytes for event in events), default=0)
        if name in self._fixed and not awake and given > 0:
            self._takes[name] = max(self._takes.get(name, 0), given + SLACK_BYTES)
        self._events += events

    def taken(self) -> list[Turned]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
