"""Rows travel as one tensor if they are small and alike, and come back as they were."""

from __future__ import annotations

import pytest
import torch

from pipeline.data_plane.packed import JOINED_BYTES, packed, unpacked

SMALL = {
    "lengths differ": [torch.arange(3), torch.arange(0), torch.arange(5)],
    "with inner dimensions": [torch.rand(2, 3), torch.rand(1, 3)],
    "bfloat16": [torch.rand(2).bfloat16(), torch.rand(4).bfloat16()],
}
OTHER = {
    "one row": [torch.arange(3)],
    "two dtypes": [torch.arange(3), torch.rand(3)],
    "two inner shapes": [torch.rand(2, 3), torch.rand(2, 4)],
    "scalars": [torch.tensor(1), torch.tensor(2)],
    "texts": [["a", "b"], ["c"]],
    "a tensor of rows": torch.rand(2, 3),
    "large rows": [torch.rand(JOINED_BYTES), torch.rand(JOINED_BYTES)],
    "no rows": [],
}


def _same(a, b) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("rows", SMALL.values(), ids=SMALL)
def test_small_rows_are_one_tensor(rows):
    message = packed({"field": rows})
    assert sum(isinstance(value, torch.Tensor) for value in message["field"].values()) == 1
    back = unpacked(message)["field"]
    assert len(back) == len(rows) and all(map(_same, back, rows))


@pytest.mark.parametrize("rows", OTHER.values(), ids=OTHER)
def test_other_rows_stay_as_they_are(rows):
    assert packed({"field": rows})["field"] is rows and unpacked({"field": rows})["field"] is rows
