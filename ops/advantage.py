"""Advantages from rewards. Samples are ordered by group: group g is the rows g * group_size to (g + 1) * group_size.

If all rewards of a group are equal, as in a group of one, every formula returns exactly 0.

    advantage_N = group_relative(reward_N, group_size=8)

Of samples of several turns, `turn_relative` gives an advantage per turn, and `of_tokens` spreads it over tokens.

Legend: N samples, B groups, G samples per group, N = B * G; U turns of a sample, V turns of all samples of a group, T
response tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def group_relative(reward_N: torch.Tensor, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    """Return (R - mean) / (std + eps) within each group, [N]: GRPO (arXiv 2402.03300, section 4.1.2).

    The standard deviation divides by G - 1. Raises ValueError if N is not a multiple of `group_size`, or the rewards
    are not floating-point numbers.
    """
    return _each_group(reward_N, group_size, lambda reward_G: _relative(reward_G, eps))


def turn_relative(
    turn_rewards: Sequence[torch.Tensor],
    reward_N: torch.Tensor,
    group_size: int,
    discount: float = 1.0,
    eps: float = 1e-6,
) -> list[torch.Tensor]:
    """Return the advantage of each turn, one [U] per sample: process supervision of GRPO (arXiv 2402.03300, section
    4.1.3).

    The reward of the sample is added to that of its last turn. Then r = (R - mean) / (std + eps) over all turns of all
    samples of the group, which is 0 if all R are equal, and the advantage of turn u is the sum of discount^(v - u) r_v
    over the turns v from u on. `turn_rewards` has one [U] per sample. With one turn per sample it is `group_relative`
    of the sums. Raises ValueError as that does, or if a sample has no turn.
    """
    _groups(reward_N, group_size)
    if len(turn_rewards) != len(reward_N):
        raise ValueError(f"turn rewards of {len(turn_rewards)} samples for the rewards of {len(reward_N)}")
    if any(each.dim() != 1 or not len(each) for each in turn_rewards):
        raise ValueError("a sample has no turn")
    added = [torch.cat([each_U[:-1], each_U[-1:] + last]) for each_U, last in zip(turn_rewards, reward_N)]
    groups = [added[first : first + group_size] for first in range(0, len(added), group_size)]
    return [
        _discounted(each_U, discount)
        for group in groups
        for each_U in _unless_equal(torch.cat(group), lambda reward_V: _relative(reward_V, eps)).split(
            [len(each_U) for each_U in group]
        )
    ]


def of_tokens(turn_advantage_U: torch.Tensor, turn_ends_U: torch.Tensor, drawn_T: torch.Tensor) -> torch.Tensor:
    """Return the advantage of each token of a response, [T]: that of its turn, and 0 for tokens not `drawn_T`.

    `turn_ends_U` has the response tokens up to the end of each turn, those between the turns included. Raises
    ValueError if the ends do not ascend, if there are more of them than advantages or fewer, or if a drawn token is in
    no turn.
    """
    tokens, last = len(drawn_T), int(turn_ends_U[-1])
    if len(turn_ends_U) != len(turn_advantage_U):
        raise ValueError(f"{len(turn_ends_U)} ends of turns for {len(turn_advantage_U)} advantages")
    if bool((turn_ends_U.diff() < 0).any()) or last > tokens or bool(drawn_T[last:].any()):
        raise ValueError(f"turns end at {turn_ends_U.tolist()}, which does not divide a response of {tokens} tokens")
    turn_T = torch.searchsorted(turn_ends_U, torch.arange(last), right=True)
    advantage_T = torch.zeros(tokens, dtype=turn_advantage_U.dtype)
    advantage_T[:last] = turn_advantage_U[turn_T]
    return advantage_T.masked_fill(~drawn_T, 0.0)


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
    # which groups share a batch.
    rows_BG = [_unless_equal(reward_G, formula) for reward_G in _groups(reward_N, group_size)]
    return torch.cat(rows_BG) if rows_BG else torch.zeros_like(reward_N)


def _unless_equal(reward_G: torch.Tensor, formula: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    # The rounded mean of equal rewards may differ from them, and dividing by eps would make that difference large.
    return torch.zeros_like(reward_G) if bool((reward_G == reward_G[0]).all()) else formula(reward_G)


def _relative(reward_G: torch.Tensor, eps: float) -> torch.Tensor:
    return (reward_G - reward_G.mean()) / (reward_G.std(correction=1) + eps)


def _discounted(reward_U: torch.Tensor, discount: float) -> torch.Tensor:
    """The discounted sum of the rewards from each turn on."""
    sums = [reward_U[-1]]
    for reward in reversed(reward_U[:-1]):
        sums.append(reward + discount * sums[-1])
    return torch.stack(sums[::-1])


def _groups(reward_N: torch.Tensor, group_size: int) -> torch.Tensor:
    if not reward_N.is_floating_point():
        raise ValueError(f"rewards are {reward_N.dtype}, not floating-point numbers")
    if reward_N.dim() != 1 or group_size < 1 or len(reward_N) % group_size:
        raise ValueError(f"rewards of shape {tuple(reward_N.shape)} are not whole groups of {group_size}")
    return reward_N.reshape(-1, group_size)
