"""Which of the worker groups that lie on the same GPUs is awake. The scheduler sees to it that only one has tasks."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.plan import Plan, PlannedStage
from pipeline.trace import Turned


class Turns:
    """`call` has every worker of a group wake up (True) or sleep, and returns what they report. All begin awake."""

    def __init__(self, plan: Plan, call: Callable[[str, bool], list[Turned]]) -> None:
        self._partners = {group.name: plan.partners(group.name) for group in plan.groups}
        self._call = call
        self._asleep: set[str] = set()
        self._events: list[Turned] = []

    def before(self, stage: PlannedStage) -> None:
        """A task of this stage is to start. Where it computes with a model, the others on the GPUs of its group (of a
        transfer, of the target) give their memory to that group."""
        if stage.uses or stage.updates:
            self._to(stage.groups[-1])

    def _to(self, name: str) -> None:
        for partner in self._partners[name]:
            if partner not in self._asleep:
                self._asleep.add(partner)
                self._events += self._call(partner, False)
        if name in self._asleep:
            self._asleep.remove(name)
            self._events += self._call(name, True)

    def taken(self) -> list[Turned]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events
