"""The kernels of a refit on a GPU: each byte where the CPU's way puts it, and the same sums."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings

from ops.refit.layout import Layout
from ops.refit.move import Moves
from ops.refit.plan import build
from ops.refit.sums import Sums
from tests.unit.refit_layouts import buffers, filled, sides


def on(device: str, memory: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()).to(device) for name, array in memory.items()}


@given(sides())
@settings(max_examples=40, deadline=None)
def test_moves(pair: tuple[Layout, Layout]) -> None:
    source, destination = pair
    plan = build(source, destination, segment_bytes=32)
    made = {}
    for device in ("cpu", "cuda"):
        given_ = [on(device, memory) for memory in filled(source)]
        held = [on(device, memory) for memory in buffers(destination)]
        for rank, own in enumerate(held):
            Moves(
                plan.copies(rank),
                lambda c, given_=given_: given_[c.source][c.source_buffer],
                lambda c, own=own: own[c.destination_buffer],
            ).run()
        made[device] = [{name: tensor.cpu() for name, tensor in own.items()} for own in held]
    for wanted, found in zip(made["cpu"], made["cuda"]):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@given(sides())
@settings(max_examples=40, deadline=None)
def test_sums(pair: tuple[Layout, Layout]) -> None:
    layout = pair[0]
    for places, memory in zip(layout.ranks, filled(layout)):
        ways = [Sums(layout.tensors, places, on(device, memory).__getitem__) for device in ("cpu", "cuda")]
        assert ways[0].now() == ways[1].now()
