"""The lengths of a batch's samples, and what rows of them cost if samples of one group share their prompt.

A row computes the prompt of neighbors in a group once; each response then attends to it. A sample of n tokens costs
n + quadratic * n^2, a prompt likewise, so a row costs what its samples cost, less the prompts that it spares.
Arithmetic only: knows no tensor and no rank.

    batch = Lengths([100, 100, 7], [20, 30, 9], groups=[2, 1])
    batch.runs([0, 1, 2])                                        # (2, 1): the first two share a prompt
    batch.spared([0, 1, 2])                                      # [100]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property


class Lengths:
    """Prompt and response lengths in tokens, the number of samples of each group (none: nothing is shared), and the
    cost of each sample in tokens.

    Raises ValueError if these numbers do not fit each other.
    """

    def __init__(
        self, prompts: Sequence[int], responses: Sequence[int], quadratic: float = 0.0, groups: Sequence[int] = ()
    ) -> None:
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} lengths of prompts for {len(responses)} of responses")
        if not (math.isfinite(quadratic) and quadratic >= 0):
            raise ValueError(f"quadratic={quadratic} is not a number of 0 or more")
        if groups and (min(groups) < 1 or sum(groups) != len(prompts)):
            raise ValueError(f"groups of {list(groups)[:8]} samples are not the {len(prompts)} samples of the batch")
        self.prompts, self.responses = list(map(int, prompts)), list(map(int, responses))
        self.total = [prompt + response for prompt, response in zip(self.prompts, self.responses)]
        self.quadratic, self._groups = quadratic, groups
        self.cost: Sequence[float] = [self.worth(n) for n in self.total] if quadratic else self.total

    def __len__(self) -> int:
        return len(self.total)

    def worth(self, tokens: int) -> float:
        """The cost of a sequence of that many tokens."""
        return tokens + self.quadratic * tokens * tokens if self.quadratic else tokens

    @cached_property
    def group(self) -> list[int]:
        """The first sample of each sample's group. Where neighbors' prompts differ in length, a group is several."""
        first = list(range(len(self)))
        start = 0
        for size in self._groups:
            for i in range(start + 1, start + size):
                if self.prompts[i] == self.prompts[i - 1]:
                    first[i] = first[i - 1]
            start += size
        return first

    @property
    def can_share(self) -> bool:
        """Whether any two samples can share a prompt."""
        return len(set(self.group)) < len(self)

    def runs(self, samples: Sequence[int]) -> tuple[int, ...]:
        """The numbers of neighbors, among ascending `samples`, that share a prompt. Their sum is that of samples."""
        sizes: list[int] = []
        before = None
        for i in samples:
            if self.group[i] == before:
                sizes[-1] += 1
            else:
                sizes.append(1)
            before = self.group[i]
        return tuple(sizes)

    def spared(self, samples: Sequence[int]) -> list[int]:
        """The lengths of the prompts that a row of ascending `samples` does not compute again."""
        return spared([self.prompts[i] for i in samples], self.runs(samples))

    def row_tokens(self, samples: Sequence[int]) -> int:
        """Computed tokens of a row of ascending `samples` that share prompts."""
        return sum(self.total[i] for i in samples) - sum(self.spared(samples))

    def row_cost(self, samples: Sequence[int]) -> float:
        """The cost of a row of ascending `samples` that share prompts."""
        return sum(self.cost[i] for i in samples) - sum(map(self.worth, self.spared(samples)))

    def descending(self, positions: Sequence[int], by: Sequence[float]) -> list[int]:
        """Sort `positions` by descending `by`; equal ones stay in canonical order."""
        return sorted(positions, key=by.__getitem__, reverse=True)

    def pad(self, positions: Sequence[int]) -> tuple[int, int]:
        """Return the smallest `prompt` and `response` of a rectangle that holds these samples."""
        response = max(map(self.responses.__getitem__, positions))
        return max(map(self.total.__getitem__, positions)) - response, response


def spared(prompts: Sequence[int], runs: Sequence[int]) -> list[int]:
    """The lengths, out of those of all samples of a row, of prompts that it does not compute again; none without
    `runs`."""
    made: list[int] = []
    start = 0
    for size in runs:
        made += prompts[start + 1 : start + size]
        start += size
    return made
