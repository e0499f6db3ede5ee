"""Rewards that compare texts. Surrounding white space never counts."""

from __future__ import annotations


def exact_match(response: str, answer: str) -> float:
    """1.0 where the texts are equal, else 0.0."""
    return float(response.strip() == answer.strip())


def digit_match(response: str, answer: str) -> float:
    """The fraction of positions that hold the right character, 0.0 to 1.0: right positions / length of the longer text.

    Dense, so that a policy which is never entirely right still learns. Two empty texts give 1.0.
    """
    response, answer = response.strip(), answer.strip()
    longest = max(len(response), len(answer))
    right = sum(given == expected for given, expected in zip(response, answer))
    return right / longest if longest else 1.0
