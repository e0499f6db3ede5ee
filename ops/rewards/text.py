"""Rewards that compare texts. Surrounding white space never counts.

Reward(exact_match)
Reward(regex_match(r"answer is (\\w+)", group=1))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass


def exact_match(response: str, answer: str) -> float:
    """Return 1.0 if the texts are equal, else 0.0."""
    return float(response.strip() == answer.strip())


def digit_match(response: str, answer: str) -> float:
    """Return the fraction of positions with the right character, 0.0 to 1.0, relative to the length of the longer text.

    Dense, so that a policy that is never entirely right still learns. Two empty texts score 1.0.
    """
    response, answer = response.strip(), answer.strip()
    longest = max(len(response), len(answer))
    right = sum(given == expected for given, expected in zip(response, answer))
    return right / longest if longest else 1.0


def regex_match(pattern: str, group: int | str | None = None, *, name: str = "regex_match") -> Callable[..., float]:
    """Return a reward from a regular expression (in the syntax of `re`, searched for anywhere in the response).

    Without `group`: 1.0 if the pattern is found; reads `response`. With `group`: 1.0 if that group of the *last* match
    is the answer, ignoring surrounding white space; reads `response` and `answer`. `name` distinguishes several such
    rewards.
    """
    return _Found(pattern, name=name) if group is None else _FoundAnswer(pattern, group, name=name)


@dataclass(frozen=True)
class _Found:
    pattern: str
    _: KW_ONLY
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, response: str) -> float:
        return float(re.search(self.pattern, response) is not None)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield the problems of the description, as (what, why, fix)."""
        yield from _pattern_problems(self.pattern)


@dataclass(frozen=True)
class _FoundAnswer:
    pattern: str
    group: int | str
    _: KW_ONLY
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, response: str, answer: str) -> float:
        found = [match.group(self.group) or "" for match in re.finditer(self.pattern, response)]
        return float(bool(found) and found[-1].strip() == answer.strip())

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield the problems of the description, as (what, why, fix)."""
        broken = list(_pattern_problems(self.pattern))
        yield from broken
        if broken:
            return
        compiled = re.compile(self.pattern)
        known = [*range(compiled.groups + 1), *compiled.groupindex]
        if isinstance(self.group, bool) or self.group not in known:
            has = f"the group{'s' * (len(known) > 2)} {', '.join(map(repr, known[1:]))}" if known[1:] else "no group"
            yield (
                f"regex_match has group={self.group!r}, and the pattern {self.pattern!r} has {has}",
                "the group is compared with the answer",
                f"group={known[1]!r}" if known[1:] else "put the answer in parentheses, or write group=0 for all of it",
            )


def _pattern_problems(pattern: str) -> Iterator[tuple[str, str, str]]:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        yield (
            f"regex_match cannot read the pattern {pattern!r}: {error}",
            "it must be a regular expression of Python's re",
            r"use a pattern such as r'answer is (\d+)'",
        )
