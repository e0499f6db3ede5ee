"""The score of a reward model as a term of the reward."""

from __future__ import annotations


def model_reward(model_reward: float) -> float:
    """Return the score that a `RewardModel` stage of the graph wrote for the sample, unchanged.

    Reward(math_verify, model_reward, weights=(1.0, 0.1))
    """
    return model_reward
