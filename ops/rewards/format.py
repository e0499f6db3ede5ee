"""Rewards for the format of a response, regardless of its content.

Reward(math_verify, tagged("think", "answer"), weights=(1.0, 0.1))
Reward(math_verify, boxed, weights=(1.0, 0.1))
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

_TAG = re.compile(r"[A-Za-z][\w-]*\Z")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed \boxed{...} in a text, or None. Braces inside it are matched."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                return text[start : start + brace.start()]
    return None


def boxed(response: str) -> float:
    r"""Return 1.0 if the response has a closed \boxed{...} and the last one is not empty, else 0.0."""
    return float(bool((last_boxed(response) or "").strip()))


@dataclass(frozen=True, init=False)
class tagged:  # noqa: N801 - it is used like a function
    """1.0 if the response consists of exactly these tags, once each and in this order, else 0.0. White space between
    and around them is allowed.

    `tagged("think", "answer")` accepts `<think>...</think> <answer>...</answer>` with no other text around it.
    """

    tags: tuple[str, ...]
    _: KW_ONLY
    name: str

    def __init__(self, *tags: str, name: str = "tagged") -> None:
        object.__setattr__(self, "tags", tags)
        object.__setattr__(self, "name", name)

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, response: str) -> float:
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        if any(response.count(mark) != 1 for mark in marks):
            return 0.0
        pattern = r"\s*".join(f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in self.tags)
        return float(re.fullmatch(rf"\s*{pattern}\s*", response, re.DOTALL) is not None)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield the problems of the description, as (what, why, fix)."""
        if not self.tags:
            yield "tagged() names no tag", "it checks for tags", "tagged('think', 'answer')"
        for tag in self.tags:
            if not (isinstance(tag, str) and _TAG.match(tag)):
                yield f"tagged has the tag {tag!r}", "a tag is a word, without brackets", "tagged('think', 'answer')"
        for tag in dict.fromkeys(tag for tag in self.tags if self.tags.count(tag) > 1):
            yield f"tagged names the tag {tag!r} twice", "each tag occurs once", "name each tag once"
