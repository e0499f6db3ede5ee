"""Keeps logprobs of the chosen tokens on the device until they are requested. Knows names and tensors.

vLLM returns logprobs token by token and request by request; this table is read once per group.

Legend: B rows of a batch, R rows of the table (one per request), T tokens of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

ROWS = 64  # initial size of the table


class LogprobTable:
    """The table. A request gets a row by name; the row is free again after `take` or `forget`."""

    def __init__(self) -> None:
        self._table_RT = torch.empty((0, 0))
        self._rows: dict[str, int] = {}
        self._free: list[int] = []

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of tokens that fit."""
        rows, width = self._table_RT.shape
        return rows, width

    def find(self, name: str) -> int | None:
        """The row of a request, if it has one."""
        return self._rows.get(name)

    def row(self, name: str, tokens: int, device: torch.device) -> int:
        """The row of a request that has at most `tokens` tokens."""
        if name not in self._rows:
            if not self._free or tokens > self._table_RT.shape[1]:
                self._grow(tokens, device)
            self._rows[name] = self._free.pop()
        return self._rows[name]

    def write(self, rows_B: torch.Tensor, places_B: torch.Tensor, logprobs_B: torch.Tensor) -> None:
        """Write one token's logprob per row."""
        self._table_RT[rows_B, places_B] = logprobs_B

    def take(self, lengths: Mapping[str, int]) -> list[bytes]:
        """The first `lengths[name]` logprobs of each request, as float32. Frees their rows."""
        rows = [self._rows[name] for name in lengths]
        table_BT = self._table_RT[rows, : max(lengths.values(), default=0)].cpu().numpy()
        self.forget(lengths)
        return [row_T[:length].tobytes() for row_T, length in zip(table_BT, lengths.values())]

    def forget(self, names: Iterable[str]) -> None:
        """Free the rows of requests whose logprobs are not needed; names without a row are ignored."""
        self._free += [self._rows.pop(name) for name in names if name in self._rows]

    def _grow(self, tokens: int, device: torch.device) -> None:
        rows, width = self._table_RT.shape
        more = max(ROWS, rows) if not self._free else 0
        table_RT = torch.zeros((rows + more, max(width, tokens)), dtype=torch.float32, device=device)
        if rows:
            table_RT[:rows, :width] = self._table_RT
        self._table_RT = table_RT
        self._free += range(rows, rows + more)
