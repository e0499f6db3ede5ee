"""Rewards that depend on the length of a response, in tokens.

Reward(math_verify, Overlong(max_tokens=16384, cache=4096), weights=(1.0, 1.0))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """Return a soft penalty for long responses: 0 up to max_tokens - cache, then linear, and -1 from max_tokens.

    length      tokens of the response
    max_tokens  the maximum desired length, in tokens
    cache       tokens before max_tokens over which the penalty grows, 1 to max_tokens

    DAPO, arXiv 2503.14476, equation 13. Beyond max_tokens it stays -1. Raises ValueError if `cache` is out of range.
    """
    if not 1 <= cache <= max_tokens:
        raise ValueError(f"cache is {cache}, not between 1 and max_tokens, {max_tokens}")
    return max(-1.0, min(0.0, (max_tokens - cache - length) / cache))


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """`overlong_penalty` as a reward, for the number of tokens that the policy drew. The attributes are its parameters.

    The rollout's max_tokens should be at least this max_tokens; otherwise responses are cut before the full penalty.
    """

    max_tokens: int
    cache: int

    __name__ = "overlong"

    def __call__(self, token_versions: list[int]) -> float:
        drawn = sum(version >= 0 for version in token_versions)
        return overlong_penalty(drawn, self.max_tokens, self.cache)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield the problems of the description, as (what, why, fix)."""
        sizes = (self.max_tokens, self.cache)
        if any(not isinstance(size, int) or isinstance(size, bool) for size in sizes) or not 1 <= sizes[1] <= sizes[0]:
            yield (
                f"Overlong has max_tokens={self.max_tokens!r} and cache={self.cache!r}",
                "the penalty grows over the last `cache` of `max_tokens` tokens",
                "use whole numbers with 1 <= cache <= max_tokens, such as max_tokens=16384, cache=4096",
            )
