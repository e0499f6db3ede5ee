"""Rewards for the layout of a response, whatever it says.

Reward(math_verify, tagged("think", "answer"), weights=(1.0, 0.1))
Reward(math_verify, boxed, weights=(1.0, 0.1))
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

_TAG = re.compile(r"[A-Za-z][\w-]*\Z")


def last_boxed(text: str) -> str | None:
    r"""What the last closed \boxed{...} of a text holds, or None. Braces inside it are matched."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                return text[start : start + brace.start()]
    return None


def boxed(response: str) -> float:
    r"""1.0 where the response has a closed \boxed{...} that is not empty, else 0.0."""
    return float(bool((last_boxed(response) or "").strip()))


@dataclass(frozen=True, init=False)
class tagged:  # noqa: N801 - it is used as the function that it stands for
    """1.0 where the response is exactly these tags, in this order, each once; white space between them is free.

    `tagged("think", "answer")` is right for `<think>...</think> <answer>...</answer>` and nothing around it.
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
        """What is wrong with the description: what, why, fix."""
        if not self.tags:
            yield "tagged() names no tag", "it looks for tags", "tagged('think', 'answer')"
        for tag in self.tags:
            if not (isinstance(tag, str) and _TAG.match(tag)):
                yield f"tagged has the tag {tag!r}", "a tag is a word, without brackets", "tagged('think', 'answer')"
        for tag in dict.fromkeys(tag for tag in self.tags if self.tags.count(tag) > 1):
            yield f"tagged names the tag {tag!r} twice", "each tag is there once", "each tag once"
