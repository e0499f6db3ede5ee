"""Rewards that depend on the length of a response, in tokens.

Reward(math_verify, Overlong(max_tokens=16384, cache=4096), weights=(1.0, 1.0))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """Soft punishment of long responses: 0 up to max_tokens - cache, then linear, -1 from max_tokens on.

    length      tokens of the response
    max_tokens  the longest response that is wanted, in tokens
    cache       the last so many of them over which the punishment grows, 1 to max_tokens

    DAPO, arXiv 2503.14476, equation 13. Beyond max_tokens it stays -1. Raises ValueError for another cache.
    """
    if not 1 <= cache <= max_tokens:
        raise ValueError(f"cache is {cache}, not between 1 and max_tokens, {max_tokens}")
    return max(-1.0, min(0.0, (max_tokens - cache - length) / cache))


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """`overlong_penalty` as a reward: the fields are its parameters, the length is that of `response_ids`.

    For it to see responses beyond max_tokens - cache, the rollout's max_tokens is as large as this one.
    """

    max_tokens: int
    cache: int

    __name__ = "overlong"

    def __call__(self, response_ids: list[int]) -> float:
        return overlong_penalty(len(response_ids), self.max_tokens, self.cache)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """What is wrong with the description: what, why, fix."""
        sizes = (self.max_tokens, self.cache)
        if any(not isinstance(size, int) or isinstance(size, bool) for size in sizes) or not 1 <= sizes[1] <= sizes[0]:
            yield (
                f"Overlong has max_tokens={self.max_tokens!r} and cache={self.cache!r}",
                "the punishment grows over the last `cache` of `max_tokens` tokens",
                "whole numbers with 1 <= cache <= max_tokens, such as max_tokens=16384, cache=4096",
            )
