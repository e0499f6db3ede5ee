"""Advantages from rewards. Samples are ordered by group: group g is the rows g * group_size to (g + 1) * group_size.

If all rewards of a group are equal, as in a group of one, every formula returns exactly 0.

    advantage_N = group_relative(reward_N, group_size=8)

Legend: N samples, B groups, G samples per group, N = B * G.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def group_relative(reward_N: torch.Tensor, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    """Return (R - mean) / (std + eps) within each group, [N]: GRPO (arXiv 2402.03300, section 4.1.2).

    The standard deviation divides by G - 1. Raises ValueError if N is not a multiple of `group_size`, or the rewards
    are not floating-point numbers.
    """
    return _each_group(
        reward_N, group_size, lambda reward_G: (reward_G - reward_G.mean()) / (reward_G.std(correction=1) + eps)
    )


def leave_one_out(reward_N: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return R minus the mean of the others in the group, [N], in units of the reward: RLOO (arXiv 2402.14740).

    It is G / (G - 1) times `mean_centred`. Raises ValueError as `group_relative` does.
    """
    scale = group_size / max(group_size - 1, 1)
    return _each_group(reward_N, group_size, lambda reward_G: (reward_G - reward_G.mean()) * scale)


def mean_centred(reward_N: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return R - mean within each group, [N], in units of the reward: Dr. GRPO (arXiv 2503.20783).

    Without the division by the standard deviation, the weight of a group grows with the spread of its rewards. Raises
    ValueError as `group_relative` does.
    """
    return _each_group(reward_N, group_size, lambda reward_G: reward_G - reward_G.mean())


def zero_spread_groups(reward_N: torch.Tensor, group_size: int) -> int:
    """Return the number of groups whose rewards are all equal, so they teach nothing. Raises ValueError as
    `group_relative` does."""
    reward_BG = _groups(reward_N, group_size)
    return int((reward_BG == reward_BG[:, :1]).all(1).sum())


def _each_group(
    reward_N: torch.Tensor, group_size: int, formula: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    # One group at a time: a reduction over [B, G] rounds differently for different B, so the advantage would depend on
    # which groups share a batch. The rounded mean of equal rewards may differ from them, and dividing by eps would make
    # that difference large.
    rows_BG = [
        torch.zeros_like(reward_G) if bool((reward_G == reward_G[0]).all()) else formula(reward_G)
        for reward_G in _groups(reward_N, group_size)
    ]
    return torch.cat(rows_BG) if rows_BG else torch.zeros_like(reward_N)


def _groups(reward_N: torch.Tensor, group_size: int) -> torch.Tensor:
    if not reward_N.is_floating_point():
        raise ValueError(f"rewards are {reward_N.dtype}, not floating-point numbers")
    if reward_N.dim() != 1 or group_size < 1 or len(reward_N) % group_size:
        raise ValueError(f"rewards of shape {tuple(reward_N.shape)} are not whole groups of {group_size}")
    return reward_N.reshape(-1, group_size)
