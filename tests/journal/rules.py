"""The rule registry. A rule checks one event before the ledger applies it and yields violations.

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
    """Register a function for events of these types."""

    def register(function: Rule) -> Rule:
        for name in types:
            RULES[name].append(function)
        return function

    return register


def stranger(ledger: Ledger, line: Line) -> str | None:
    """Return what an event names that the plan does not have, or None. Such an event is not checked further."""
    planned = ledger.planned
    stage, group = line.event.get("stage"), line.event.get("group")
    known = planned.stages if line.type == "put" else planned.internal
    if line.type not in ("dropped", "failed") and stage is not None and stage not in known:
        return f"{line.type} of stage {stage!r}, which the plan does not have"
    if group is not None and group not in planned.worker_groups:
        return f"{line.type} of worker group {group!r}, which the plan does not have"
    return None


def named(groups: object) -> str:
    """Return a text that names the first few groups."""
    numbers = list(groups)  # type: ignore[call-overload]
    shown = ", ".join(map(str, numbers[:6]))
    return f"group{'s' if len(numbers) > 1 else ''} {shown}{' ...' if len(numbers) > 6 else ''}"
