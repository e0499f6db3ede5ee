"""Random tensor layouts, and memory buffers that match them."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from ops.refit.layout import Box, Layout, Place, Tensor, dense
from ops.refit.move import Moves
from ops.refit.plan import RefitPlan

POISON = 0xEE


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """Return the boxes of a tensor whose dimensions are split at the positions `cuts`."""
    boxes: list[Box] = [()]
    for extent, at in zip(shape, cuts):
        edges = [0, *sorted({place for place in at if 0 < place < extent}), extent]
        boxes = [(*box, pair) for box in boxes for pair in pairwise(edges)]
    return boxes


@st.composite
def sides(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Draw two layouts of the same tensors, each with its own splits, replicas, padding and strides."""
    tensors = {
        f"t{i}": Tensor(tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))), draw(st.sampled_from(TYPES)))
        for i in range(draw(st.integers(1, 3)))
    }
    return draw(layouts(tensors)), draw(layouts(tensors))


TYPES = ["bfloat16", "float32", "uint8"]


@st.composite
def layouts(draw: st.DrawFn, tensors: dict[str, Tensor]) -> Layout:
    ranks: list[list[Place]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, tensor in tensors.items():
        cuts = [draw(st.lists(st.integers(0, extent), max_size=2)) for extent in tensor.shape]
        for number, box in enumerate(grid(tensor.shape, cuts)):
            for rank in draw(st.lists(st.integers(0, len(ranks) - 1), min_size=1, max_size=3, unique=True)):
                place = dense(name, box, tensor.item_bytes, f"{name}.{number}", draw(st.integers(0, 5)))
                if len(box) > 1 and draw(st.booleans()):  # the row stride exceeds the row length
                    apart = place.strides[-2] + draw(st.integers(0, 8))
                    outer = [apart * (box[-2][1] - box[-2][0])] * (len(box) - 2)  # at most three dimensions
                    place = Place(name, box, place.buffer, place.offset, (*outer, apart, place.strides[-1]))
                ranks[rank].append(place)
    return Layout(tensors, ranks)


def buffers(layout: Layout) -> list[dict[str, np.ndarray]]:
    """Return each rank's buffers, filled with poison, with spare bytes after each place."""
    made: list[dict[str, np.ndarray]] = []
    for places in layout.ranks:
        made.append({})
        for place in places:
            far = sum((b - a - 1) * stride for (a, b), stride in zip(place.box, place.strides))
            room = place.offset + far + layout.tensors[place.tensor].item_bytes + 3
            made[-1][place.buffer] = np.full(max(room, len(made[-1].get(place.buffer, ()))), POISON, np.uint8)
    return made


def values(layout: Layout) -> dict[str, np.ndarray]:
    """Return random bytes for each tensor."""
    made = {}
    for salt, (name, tensor) in enumerate(layout.tensors.items()):
        rng = np.random.default_rng(salt)
        made[name] = rng.integers(0, 200, (*tensor.shape, tensor.item_bytes), dtype=np.uint8)
    return made


def view(memory: np.ndarray, place: Place, item_bytes: int) -> np.ndarray:
    """Return a place in memory as an array of its box, with the bytes of an element as last dimension."""
    shape = (*(b - a for a, b in place.box), item_bytes)
    return np.lib.stride_tricks.as_strided(memory[place.offset :], shape, (*place.strides, 1))


def cut(tensor: np.ndarray, box: Box) -> np.ndarray:
    return tensor[tuple(slice(*pair) for pair in box)]


def filled(layout: Layout, *, mark: bool = False) -> list[dict[str, np.ndarray]]:
    """Return each rank's buffers with the values of its tensors; bytes outside every place are poison.

    With `mark`, bytes inside a place are 1 and all others are 0."""
    model, made = values(layout), buffers(layout)
    if mark:
        made = [{name: np.zeros_like(memory) for name, memory in own.items()} for own in made]
    for rank, places in enumerate(layout.ranks):
        for place in places:
            item_bytes = layout.tensors[place.tensor].item_bytes
            held = view(made[rank][place.buffer], place, item_bytes)
            held[...] = 1 if mark else cut(model[place.tensor], place.box)
    return made


def moves(plan: RefitPlan, rank: int, source: list[dict[str, torch.Tensor]], own: dict[str, torch.Tensor]) -> Moves:
    """Return a receiver's part of a plan, reading from the buffers of all senders into its own buffers."""
    return Moves(
        plan.copies(rank),
        lambda copy: source[copy.source][copy.source_buffer],
        lambda copy: own[copy.destination_buffer],
    )


def on(device: str, memory: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return buffers as tensors: sharing memory on the CPU, copied on any other device."""
    return {name: torch.from_numpy(array).to(device) for name, array in memory.items()}


def shifted(array: np.ndarray, shift: int, device: str = "cpu") -> torch.Tensor:
    """Return the bytes as a tensor that starts `shift` bytes after a multiple of eight."""
    return torch.cat([torch.zeros(shift, dtype=torch.uint8), torch.from_numpy(array)]).to(device)[shift:]
