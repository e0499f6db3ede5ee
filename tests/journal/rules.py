"""The register of rules. A rule looks at one event, before the ledger takes it, and yields what is wrong with it.

@rule("admitted")
def room(ledger: Ledger, line: Line) -> Found:
    if ...:
        yield "I3", "..."
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeAlias

from tests.journal.ledger import Ledger
from tests.journal.record import Line

Found: TypeAlias = Iterator[tuple[str, str]]  # invariant, text
Rule: TypeAlias = Callable[[Ledger, Line], Found]

RULES: defaultdict[str, list[Rule]] = defaultdict(list)  # type of event -> rules, in order


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Have a function look at events of these types."""

    def register(function: Rule) -> Rule:
        for name in types:
            RULES[name].append(function)
        return function

    return register


def stranger(ledger: Ledger, line: Line) -> str | None:
    """What an event names that the plan does not have; such an event is not looked at any further."""
    planned = ledger.planned
    stage, group = line.event.get("stage"), line.event.get("group")
    known = planned.stages if line.type == "put" else planned.internal
    if line.type not in ("dropped", "failed") and stage is not None and stage not in known:
        return f"{line.type} of stage {stage!r}, which the plan does not have"
    if group is not None and group not in planned.worker_groups:
        return f"{line.type} of worker group {group!r}, which the plan does not have"
    return None


def named(groups: object) -> str:
    """A few groups by number."""
    numbers = list(groups)  # type: ignore[call-overload]
    shown = ", ".join(map(str, numbers[:6]))
    return f"group{'s' if len(numbers) > 1 else ''} {shown}{' ...' if len(numbers) > 6 else ''}"
