"""Refit kernels on a GPU put each byte where the CPU code does, and compute the same sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ops.refit import sums
from ops.refit.layout import Layout, Tensor, dense, size
from ops.refit.plan import build
from ops.refit.sums import Sums
from tests.examples import few
from tests.unit.refit_layouts import buffers, filled, moves, on, shifted, sides


@given(sides())
@settings(max_examples=few(80), deadline=None)
def test_moves(pair: tuple[Layout, Layout]) -> None:
    source, destination = pair
    plan = build(source, destination, segment_bytes=32)
    made = {}
    for device in ("cpu", "cuda"):
        given_ = [on(device, memory) for memory in filled(source)]
        held = [on(device, memory) for memory in buffers(destination)]
        for rank, own in enumerate(held):
            moves(plan, rank, given_, own).run()
        made[device] = [{name: tensor.cpu() for name, tensor in own.items()} for own in held]
    for wanted, found in zip(made["cpu"], made["cuda"]):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("block", [2, sums.BLOCK])
@given(pair=sides())
@settings(max_examples=few(80), deadline=None)
def test_sums(block: int, pair: tuple[Layout, Layout]) -> None:
    layout = pair[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "BLOCK", block)
        for places, memory in zip(layout.ranks, filled(layout)):
            ways = [Sums(layout.tensors, places, on(device, memory).__getitem__) for device in ("cpu", "cuda")]
            assert ways[0].now() == ways[1].now()


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
@given(pair=sides())
@settings(max_examples=few(40), deadline=None)
def test_sums_of_what_is_copied(shift: int, pair: tuple[Layout, Layout]) -> None:
    layout = pair[0]
    for places, memory, empty in zip(layout.ranks, filled(layout), buffers(layout)):
        found = []
        for device in ("cpu", "cuda"):
            held = {name: shifted(array, shift, device) for name, array in memory.items()}
            copy = on(device, {name: array.copy() for name, array in empty.items()})
            summed = Sums(layout.tensors, places, copy.__getitem__, held.__getitem__).now()
            found.append((summed, {name: tensor.tolist() for name, tensor in copy.items()}))
        assert found[0] == found[1]


def test_sums_of_many_tiles_and_blocks() -> None:
    """Columns of a matrix, which start and end inside a block."""
    tensors = {"t": Tensor((1000, 5000), "bfloat16")}
    box = ((3, 900), (1204, 3700))
    memory = {"t": np.random.default_rng(0).integers(0, 256, 2 * size(box), np.uint8)}
    found = [
        Sums(tensors, [dense("t", box, 2, "t")], on(device, memory).__getitem__).now() for device in ("cpu", "cuda")
    ]
    assert found[0] == found[1]
