"""Logprobs of the tokens that were chosen: they stay on the device until somebody asks. Knows names and tensors.

vLLM hands logprobs out token by token and request by request; a table is read once a group.

Legend: B rows of a batch, R rows of the table, one a request, T its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

ROWS = 64  # that the table begins with


class Logprobs:
    """The table. Its rows are given by name and are free again when they were taken or forgotten."""

    def __init__(self) -> None:
        self._table_RT = torch.empty((0, 0))
        self._rows: dict[str, int] = {}
        self._free: list[int] = []

    def row(self, name: str, tokens: int, device: torch.device) -> int:
        """The row of a request, which may write at most so many tokens."""
        if name not in self._rows:
            if not self._free or tokens > self._table_RT.shape[1]:
                self._grow(tokens, device)
            self._rows[name] = self._free.pop()
        return self._rows[name]

    def write(self, rows_B: torch.Tensor, places_B: torch.Tensor, logprobs_B: torch.Tensor) -> None:
        """Of one token a row."""
        self._table_RT[rows_B, places_B] = logprobs_B

    def take(self, lengths: Mapping[str, int]) -> list[bytes]:
        """The first so many logprobs of each request, as float32; their rows are free then."""
        rows = [self._rows[name] for name in lengths]
        table_BT = self._table_RT[rows, : max(lengths.values(), default=0)].cpu().numpy()
        self.forget(lengths)
        return [row_T[:length].tobytes() for row_T, length in zip(table_BT, lengths.values())]

    def forget(self, names: Iterable[str]) -> None:
        """Free the rows of requests that nobody will ask for; one without a row has none to free."""
        self._free += [self._rows.pop(name) for name in names if name in self._rows]

    def _grow(self, tokens: int, device: torch.device) -> None:
        rows, width = self._table_RT.shape
        more = max(ROWS, rows) if not self._free else 0
        table_RT = torch.zeros((rows + more, max(width, tokens)), dtype=torch.float32, device=device)
        if rows:
            table_RT[:rows, :width] = self._table_RT
        self._table_RT = table_RT
        self._free += range(rows, rows + more)
