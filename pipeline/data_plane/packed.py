"""Rows of a field as they travel: small tensors as one, because each tensor of a message costs a frame of its own.

    message = packed({"response_ids": [tensor, tensor], "response": [["a"], ["b"]]})
    unpacked(message)  # equal to what was packed

Rows that travel together share memory in the store until the last of them is cleared. Knows rows, neither messages nor
stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JOINED_BYTES = 4096  # rows up to this size, in the mean, are copied into one tensor
_VALUES, _SIZES = "values", "sizes"


def packed(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with one tensor [entries, *inner] in the place of small tensors of one dtype and inner shape.
    Other rows stay as they are: large ones, texts, and a tensor of rows."""
    return {name: _packed(rows) for name, rows in columns.items()}


def unpacked(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that were packed, with one view per row."""
    return {
        name: list(rows[_VALUES].split_with_sizes(rows[_SIZES])) if isinstance(rows, dict) else rows
        for name, rows in columns.items()
    }


def _packed(rows: Any) -> Any:
    import torch

    if not isinstance(rows, list) or len(rows) < 2 or type(first := rows[0]) is not torch.Tensor or not first.dim():
        return rows
    dtype, inner = first.dtype, first.shape[1:]
    if not all(
        type(row) is torch.Tensor and row.dtype == dtype and row.dim() and row.shape[1:] == inner for row in rows
    ):
        return rows
    if sum(row.nbytes for row in rows) > JOINED_BYTES * len(rows):
        return rows
    return {_VALUES: torch.cat(rows), _SIZES: [len(row) for row in rows]}
