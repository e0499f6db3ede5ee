"""Rewards of samples of several turns, from those that their environment gave.

Reward(exact_match, turn_sum, weights=(1.0, 0.1))
"""

from __future__ import annotations


def turn_sum(turn_rewards: list[float]) -> float:
    """Return the sum of the rewards that an environment gave for the turns of an episode.

    `Advantage("turn")` reads the rewards of turns by itself, so a graph with both counts them twice.
    """
    return float(sum(turn_rewards))
