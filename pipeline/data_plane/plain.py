"""Columns in the types that users' code may give them, as those that every store takes. Loads no torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeGuard

from pipeline.declare.columns import Ragged

if TYPE_CHECKING:
    import torch


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor; loads nothing."""
    loaded: Any = sys.modules.get("torch")
    return loaded is not None and isinstance(value, loaded.Tensor)


def plain(column: Any) -> Any:
    """Return a column whose lengths are of type int, whose texts are of type str in a list, and whose tensor is not a
    view that negates or conjugates: those of other types would be refused where they are stored or recorded."""
    if isinstance(column, Ragged):
        return Ragged(plain(column.values), tuple(map(_length, column.lengths)))
    if isinstance(column, list | tuple):
        return [str(text) if isinstance(text, str) else text for text in column]
    return column.resolve_conj().resolve_neg() if is_tensor(column) else column


def _length(given: Any) -> Any:
    if type(given) is int or not isinstance(given, SupportsIndex):  # a check by a protocol takes microseconds
        return given
    return int(given)
