"""Describes where the ranks of one side hold a model's tensors: boxes of each tensor and their places in memory.

    tensors = {"model.norm.weight": Tensor((1024,), "bfloat16")}
    layout = Layout(tensors, ranks=[[Place("model.norm.weight", ((0, 1024),), "norm", 0, (2,))]])

Coordinates follow a Hugging Face folder, without padding. A layer's experts form one tensor each for gate, up and down,
with the experts in the first dimension. Each side describes itself only in these coordinates, so neither needs to know
how the other names or interleaves its parameters. Plain numbers: no device is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

Box = tuple[tuple[int, int], ...]  # for each dimension: start and stop index


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model: its full shape and torch's name for its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Place:
    """A box of a tensor in a rank's memory. Its first element is `offset` bytes into `buffer`; `strides` are in
    bytes."""

    tensor: str
    box: Box
    buffer: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """What each rank of one side holds. Raises ValueError, naming rank and tensor, for an invalid place."""

    tensors: Mapping[str, Tensor]
    ranks: Sequence[Sequence[Place]]

    def __post_init__(self) -> None:
        for rank, places in enumerate(self.ranks):
            for place in places:
                self._check(rank, place)

    def _check(self, rank: int, place: Place) -> None:
        where = f"rank {rank} holds {place.tensor!r}"
        tensor = self.tensors.get(place.tensor)
        if tensor is None:
            raise ValueError(f"{where}, which is no tensor of the model")
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"{where} of dtype {tensor.dtype!r}, whose size is not known")
        if not len(place.box) == len(place.strides) == len(tensor.shape):
            raise ValueError(f"{where} of shape {list(tensor.shape)} as box {list(place.box)}, strides {place.strides}")
        if any(not 0 <= start < stop <= size for (start, stop), size in zip(place.box, tensor.shape)):
            raise ValueError(f"{where} of shape {list(tensor.shape)} as box {list(place.box)}, which is not within it")
        if place.offset < 0 or any(stride <= 0 for stride in place.strides):
            raise ValueError(f"{where} at offset {place.offset} with strides {place.strides}: bytes count forwards")
        reach = tensor.item_bytes
        for stride, extent in sorted(zip(place.strides, (stop - start for start, stop in place.box))):
            if extent > 1 and stride < reach:
                raise ValueError(f"{where} as box {list(place.box)} with strides {place.strides}: its elements overlap")
            reach += (extent - 1) * stride


def dense(tensor: str, box: Box, item_bytes: int, buffer: str, offset: int = 0) -> Place:
    """Return the place of a box that is contiguous in row-major order."""
    strides: list[int] = []
    for start, stop in reversed(box):
        strides.insert(0, item_bytes)
        item_bytes *= stop - start
    return Place(tensor, box, buffer, offset, tuple(strides))


def whole(shape: Iterable[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def size(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(stop - start for start, stop in box)


def intersection(first: Box, second: Box) -> Box | None:
    """Return the overlap of two boxes, or None."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return both if all(start < stop for start, stop in both) else None


def without(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that cover `box` without `hole`, which must be inside `box`."""
    rest: list[Box] = []
    left = list(box)
    for i, (start, stop) in enumerate(hole):
        before, after = (left[i][0], start), (stop, left[i][1])
        rest += [(*left[:i], side, *left[i + 1 :]) for side in (before, after) if side[0] < side[1]]
        left[i] = (start, stop)
    return rest


def check_apart(layout: Layout, rank: int) -> None:
    """Raise ValueError if two places of a rank share a byte."""
    spans = [_span(layout, place, number) for number, place in enumerate(layout.ranks[rank])]
    reaching: list[_Span] = []  # spans that end after the next one starts
    for span in sorted(spans):
        reaching = [other for other in reaching if other.buffer == span.buffer and other.stop > span.start]
        for other in reaching:
            first, second = layout.ranks[rank][other.place], layout.ranks[rank][span.place]
            byte = _shared(_runs(layout, first), _runs(layout, second))
            if byte is not None:
                both = f"{first.tensor!r} and {second.tensor!r}"
                raise ValueError(f"rank {rank} holds {both} on byte {byte} of {span.buffer!r}")
        reaching.append(span)


class _Span(msgspec.Struct, frozen=True, order=True, gc=False):
    """The byte range of a place, stop exclusive; `place` is its index in its rank."""

    buffer: str
    start: int
    stop: int
    place: int


def _span(layout: Layout, place: Place, number: int) -> _Span:
    far = sum((stop - start - 1) * stride for (start, stop), stride in zip(place.box, place.strides))
    stop = place.offset + far + layout.tensors[place.tensor].item_bytes
    return _Span(place.buffer, place.offset, stop, number)


def _runs(layout: Layout, place: Place) -> tuple[np.ndarray, int]:
    """Return the start offsets of a place's runs, and the bytes of one run."""
    run, starts = layout.tensors[place.tensor].item_bytes, np.array([place.offset])
    for stride, extent in sorted(zip(place.strides, (stop - start for start, stop in place.box))):
        if extent > 1 and stride == run and len(starts) == 1:
            run *= extent
        elif extent > 1:
            starts = np.add.outer(starts, stride * np.arange(extent)).ravel()
    return starts, run


def _shared(first: tuple[np.ndarray, int], second: tuple[np.ndarray, int]) -> int | None:
    """Return a byte that two places share, or None."""
    starts = np.concatenate([first[0], second[0]])
    ends = np.concatenate([first[0] + first[1], second[0] + second[1]])
    order = np.argsort(starts, kind="stable")
    meets = np.flatnonzero(ends[order][:-1] > starts[order][1:])
    return int(starts[order][meets[0] + 1]) if len(meets) else None
