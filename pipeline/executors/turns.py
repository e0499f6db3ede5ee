"""Which of the worker groups that lie on the same GPUs is awake. The scheduler sees to it that only one has tasks."""

from __future__ import annotations

from typing import Protocol

from pipeline.declare.group import LEADS
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record.trace import Turned

SLACK_BYTES = 256 << 20  # what is taken again is cut into other pieces


class Call(Protocol):
    """Has every worker of a group wake up (True), or sleep until `room` bytes of each GPU are free; None is all that
    it can give."""

    def __call__(self, name: str, awake: bool, room: int | None) -> list[Turned]: ...


class Turns:
    """`call` does it, and returns what the workers report. All begin awake.

    What a backend of `LEADS` takes when it wakes is fixed from its start, and seen when it gives it away: from then on,
    its one partner keeps what is left. Every other group is given all.
    """

    def __init__(self, plan: Plan, call: Call) -> None:
        self._partners = {group.name: plan.partners(group.name) for group in plan.groups}
        self._fixed = {group.name for group in plan.groups if group.backend in LEADS}
        self._call = call
        self._asleep: set[str] = set()
        self._takes: dict[str, int] = {}  # bytes, by group
        self._events: list[Turned] = []

    def before(self, stage: PlannedStage) -> None:
        """A task of this stage is to start. Where it computes with a model, the others on the GPUs of its group (of a
        transfer, of the target) give their memory to that group."""
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
        """What happened since the last call."""
        events, self._events = self._events, []
        return events
