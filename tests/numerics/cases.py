"""Batches for the checks: rows of differing length, one of them empty, from two policies, with NaN beyond the mask."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

torch.set_num_threads(1)

CASES = 6
DOUBLE = torch.float64


def near(actual: torch.Tensor, expected: list | float, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=DOUBLE), rtol=tolerance, atol=tolerance)


def same(actual: torch.Tensor, expected: list) -> None:
    """Check that the flags are bool and equal."""
    assert actual.dtype == torch.bool
    assert actual.tolist() == expected


def refuses(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@dataclass(frozen=True)
class Ragged:
    """Rows of zero, one and more tokens, and columns beyond the longest row."""

    rng: random.Random
    lengths: list[int]
    width: int

    @property
    def mask(self) -> torch.Tensor:
        return torch.tensor([[t < length for t in range(self.width)] for length in self.lengths])

    def rows(self, draw: Callable[[], float]) -> list[list[float]]:
        return [[draw() for _ in range(length)] for length in self.lengths]

    def normal(self, mean: float = 0.0) -> list[list[float]]:
        return self.rows(lambda: self.rng.gauss(mean, 1))

    def choices(self, *values: float) -> list[list[float]]:
        return self.rows(lambda: self.rng.choice(values))

    def tensor(self, rows: Sequence[Sequence[float]], fill: float = 0.0) -> torch.Tensor:
        return torch.tensor([[*row, *[fill] * (self.width - len(row))] for row in rows], dtype=DOUBLE)

    def list(self, rows: Sequence[Sequence[float]], fill: float = 0.0) -> list[list[float]]:
        return [[*row, *[fill] * (self.width - len(row))] for row in rows]

    def flags(self, rows: Sequence[Sequence[bool]]) -> list[list[bool]]:
        return [[*row, *[False] * (self.width - len(row))] for row in rows]


def ragged(seed: int) -> Ragged:
    rng = random.Random(seed)
    lengths = [0, 1, 3, *[rng.randint(0, 4) for _ in range(seed % 3)], rng.randint(2, 4)]
    return Ragged(rng, lengths, max(lengths) + rng.randint(1, 2))


@dataclass(frozen=True)
class Policies:
    """Log-probabilities of one batch under two policies, and advantages that are positive, negative and 0."""

    case: Ragged
    new: list[list[float]]
    old: list[list[float]]
    advantage: list[float]

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        new = self.case.tensor(self.new, math.nan).requires_grad_()
        return new, self.case.tensor(self.old, math.inf), torch.tensor(self.advantage, dtype=DOUBLE)

    def token_advantage(self, weights: list[list[float]] | None) -> list[list[float]]:
        """Return each token's advantage times the weight of its loss: the loss is linear in that product."""
        if weights is None:
            return [[advantage] * len(row) for advantage, row in zip(self.advantage, self.new)]
        return [[advantage * weight for weight in row] for advantage, row in zip(self.advantage, weights)]


def policies(seed: int, spread: float = 0.4) -> Policies:
    case = ragged(seed)
    old = case.rows(lambda: -3 * case.rng.random())
    new = [[lp + case.rng.gauss(0, spread) for lp in row] for row in old]
    signs = [1.0, 0.0, -1.0, 1.0, -1.0, 1.0, -1.0][seed % 2 :]
    return Policies(case, new, old, [sign * (0.1 + case.rng.random()) for sign in signs[: len(new)]])
