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
from collections.abc import Collection, Mapping, Sequence
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


def from_tensordict(made: TensorDictBase, ragged: Collection[str] = ()) -> Columns:
    """Return the columns of a TensorDict, or of a lazy stack of one per sample. An entry of another kind stays as it
    is; the data plane's checks name it. `ragged` are the columns that a lazy stack has as `Ragged` whatever the
    lengths.

    Copies nothing but jagged tensors with holes, and the rows of a lazy stack."""
    names = [str(name) for name in made.keys()]  # noqa: SIM118 - iterating gives rows
    rows = getattr(made, "tensordicts", None)
    if rows is None or made.stack_dim:
        return {name: _column(made.get(name)) for name in names}
    return {name: _stacked([row.get(name) for row in rows], name in ragged) for name in names}


def _stacked(entries: Sequence[Any], ragged: bool) -> Any:
    import torch

    if not all(isinstance(entry, torch.Tensor) for entry in entries):
        return [getattr(entry, "data", entry) for entry in entries]
    if not ragged and len({(entry.shape, entry.dtype) for entry in entries}) == 1:
        return torch.stack(list(entries))
    alike = len({(entry.dim(), entry.shape[1:], entry.dtype) for entry in entries}) == 1 and entries[0].dim()
    return Ragged.of(entries) if alike else list(entries)


def _column(entry: Any) -> Any:
    if getattr(entry, "is_nested", False):
        import torch

        if entry.layout == torch.jagged and entry.lengths() is None:
            return Ragged(entry.values(), tuple(entry.offsets().diff().tolist()))
        return Ragged.of(entry.unbind())
    if type(entry).__module__.startswith("tensordict"):
        return entry.as_subclass(sys.modules["torch"].Tensor) if hasattr(entry, "as_subclass") else entry.tolist()
    return entry
