"""Which of the worker groups that lie on the same GPUs is awake. The scheduler sees to it that only one has tasks."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.plan import Plan
from pipeline.trace import Turned


class Turns:
    """`call` has every worker of a group wake up (True) or sleep, and returns what they report. All begin awake."""

    def __init__(self, plan: Plan, call: Callable[[str, bool], list[Turned]]) -> None:
        self._partners = {group.name: plan.partners(group.name) for group in plan.groups}
        self._call = call
        self._asleep: set[str] = set()
        self._events: list[Turned] = []

    def to(self, name: str) -> None:
        """Before a task of this group: the others on its GPUs give their memory to it."""
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
