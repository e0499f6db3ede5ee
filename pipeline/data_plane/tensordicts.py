"""Columns as a TensorDict, and back: the form in which a stage may take and return them. Loads tensordict when called.

as_tensordict({"reward": tensor, "response_ids": Ragged(...), "response": ["a", "b"]})

column                 entry of the TensorDict, whose batch size is [samples]
tensor [N, ...]        the same tensor
`Ragged`               a nested tensor of layout torch.jagged, which shares its memory; columns of equal lengths share
                       their offsets, so that they can be computed with each other
texts                  a NonTensorStack of str
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeGuard

from pipeline.declare.abilities import takes_tensordict
from pipeline.declare.columns import Column, Columns, Ragged

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict, TensorDictBase


def is_tensordict(value: object) -> TypeGuard[TensorDictBase]:
    """Return whether a value is a TensorDict; loads nothing."""
    loaded: Any = sys.modules.get("tensordict")
    return loaded is not None and isinstance(value, loaded.TensorDictBase)


def given(stage: object, columns: Columns) -> Any:
    """Return a runner's columns in the form that its stage takes."""
    if not takes_tensordict(stage):
        return columns
    return as_tensordict(columns, len(next(iter(columns.values()), ())))


def as_tensordict(columns: Mapping[str, Column], samples: int) -> TensorDict:
    """Return columns of `samples` samples as a TensorDict."""
    from tensordict import TensorDict

    offsets: dict[tuple[int, ...], torch.Tensor] = {}
    return TensorDict({name: _entry(column, offsets) for name, column in columns.items()}, batch_size=[samples])


def _entry(column: Column, offsets: dict[tuple[int, ...], torch.Tensor]) -> Any:
    if isinstance(column, Ragged):
        import torch

        if column.lengths not in offsets:
            offsets[column.lengths] = torch.tensor([0, *accumulate(column.lengths)])
        return torch.nested.nested_tensor_from_jagged(column.values, offsets=offsets[column.lengths])
    if isinstance(column, Sequence):
        from tensordict import NonTensorStack

        return NonTensorStack(*column)
    return column


def from_tensordict(made: TensorDictBase) -> Columns:
    """Return the columns of a TensorDict. An entry of another kind stays as it is; the data plane's checks name it.

    Copies nothing but jagged tensors with holes."""
    return {str(name): _column(made.get(name)) for name in made.keys()}  # noqa: SIM118 - iterating gives rows


def _column(entry: Any) -> Any:
    if getattr(entry, "is_nested", False):
        import torch

        if entry.layout == torch.jagged and entry.lengths() is None:
            return Ragged(entry.values(), tuple(entry.offsets().diff().tolist()))
        return Ragged.of(entry.unbind())
    return entry.tolist() if type(entry).__module__.startswith("tensordict") else entry
