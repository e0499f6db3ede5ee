"""Rules for parameters of descriptions, as data. Knows no description.

RULES = (
    at_least("epochs", 1),
    number("lr", low=0, fix="1e-6"),
    one_of("fetch", ("auto", "leader"), why="workers need the same samples, or they do not"),
)
yield from broken(RULES, self, where=str(self.location), says=f"stage {self.name!r} has {{}}")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Problem, shown


@dataclass(frozen=True)
class Rule:
    """A rule for one parameter: legal values, the reason, and the fix, which may depend on the value."""

    name: str
    legal: Callable[[Any], bool]
    why: str
    fix: str | Callable[[Any], str]

    def optional(self) -> Rule:
        """Return the same rule, but with None legal too."""
        return Rule(self.name, lambda value: value is None or self.legal(value), self.why, self.fix)


def at_least(name: str, least: int, *, most: float = math.inf, why: str = "", fix: object = None) -> Rule:
    """Return the rule for an integer from `least` to `most`. The fix of a fraction is to round it down, if that is
    legal."""
    why = why or f"{name} must be a whole number, {least} or more"
    default = least if fix is None else fix
    return Rule(
        name,
        lambda value: is_whole(value, least) and value <= most,
        why,
        lambda value: f"{name}={int(value) if is_number(value) and least <= value <= most else default}",
    )


def number(name: str, legal: Callable[[float], bool], *, why: str, fix: object) -> Rule:
    """Return the rule for a finite number that is `legal`."""
    return Rule(name, lambda value: is_number(value) and legal(value), why, f"{name}={fix}")


def one_of(name: str, words: Sequence[str], *, why: str = "", fix: str = "") -> Rule:
    """Return the rule for a parameter that is one of these words."""
    why = why or f"{name} is {' or '.join(map(repr, words))}"
    return Rule(name, lambda value: value in words, why, fix or f"{name}={words[0]!r}")


def truth(name: str, *, why: str = "", fix: object) -> Rule:
    """Return the rule for a parameter that is True or False."""
    return Rule(name, lambda value: isinstance(value, bool), why or f"{name} must be True or False", f"{name}={fix}")


def broken(rules: Iterable[Rule], described: object, *, where: str, says: str = "{}") -> Iterator[Problem]:
    """Yield a problem for each parameter that breaks its rule; `says` embeds `name=value` in a sentence."""
    for rule in rules:
        value = getattr(described, rule.name)
        if not rule.legal(value):
            what = says.replace("{}", f"{rule.name}={shown(value)}")
            fix = rule.fix if isinstance(rule.fix, str) else rule.fix(value)
            yield Problem(where=where, what=what, why=rule.why, fix=fix)


def is_whole(value: object, least: int) -> bool:
    """Return whether `value` is an integer of at least `least`; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
