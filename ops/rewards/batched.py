"""Rewards that take all samples of a task at once.

    @batched
    def novelty(response: list[str]) -> list[float]:
        seen = Counter(response)
        return [1.0 / seen[text] for text in response]

Their parameter names are fields, as for any reward; each parameter is a list with one entry per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., Sequence[float]])


class SampleError(ValueError):
    """Raised by a batched reward if one sample is invalid; `index` is its position in the lists."""

    def __init__(self, index: int, text: str) -> None:
        self.index = index
        super().__init__(text)

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.index, str(self))


def batched(function: Function) -> Function:
    """Mark a function as a batched reward: it receives lists and returns one number per sample, in the same order."""
    function.batched = True  # type: ignore[attr-defined]
    return function
