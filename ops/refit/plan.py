"""Plans which rank of one layout sends which bytes to which rank of another. Each destination byte is sent once.

    plan = build(trainer, sampler)                 # every rank builds the same plan: compare plan.digest first
    for copy in plan.copies(receiver=3): ...       # what rank 3 of the sampler receives, and from where

A receiver's boxes are cut out of the boxes that senders hold. A box that several senders hold (data-parallel replicas,
tied weights) is divided into segments; each is assigned to the sender with the least load. Senders that hold the same
boxes differ by at most one segment. Plain numbers: no device is touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise, product

import msgspec
import numpy as np

from ops.refit.layout import Box, Layout, Place, check_apart, intersection, size, without

SEGMENT_BYTES = 32 << 20  # limit for one piece from one sender to one receiver


class Copy(msgspec.Struct, frozen=True, gc=False):
    """`rows` runs of `run` bytes from a source rank's buffer to a destination rank's buffer. Rows are `source_stride`
    bytes apart at the source and `destination_stride` at the destination."""

    source: int
    destination: int
    source_buffer: str
    destination_buffer: str
    source_offset: int
    destination_offset: int
    run: int
    rows: int
    source_stride: int
    destination_stride: int

    @property
    def size(self) -> int:
        """Bytes moved."""
        return self.run * self.rows


class Rows(msgspec.Struct, frozen=True, gc=False):
    """A box as rows of bytes in two places: offsets of the first row, bytes per row, number of rows, row strides."""

    here: int
    there: int
    run: int
    rows: int
    here_stride: int
    there_stride: int


class _Segment(msgspec.Struct, frozen=True):
    """A box of a tensor that all `sources` hold and all `destinations` need, each a (rank, place)."""

    box: Box
    item_bytes: int
    size: int  # bytes
    sources: tuple[tuple[int, Place], ...]
    destinations: tuple[tuple[int, Place], ...]


class RefitPlan:
    """The result of `build`. `sent` and `received` are bytes by rank."""

    def __init__(self, segments: Sequence[_Segment], chosen: Sequence[np.ndarray], senders: int, to: Layout) -> None:
        self._segments, self._chosen = segments, chosen  # for each segment, the source of each destination
        self._to = to
        took = np.repeat([segment.size for segment in segments], [len(segment.destinations) for segment in segments])
        givers = [segment.sources[n][0] for segment, choice in zip(segments, chosen) for n in choice.tolist()]
        takers = [rank for segment in segments for rank, _ in segment.destinations]
        self.sent, self.received = _summed(givers, took, senders), _summed(takers, took, len(to.ranks))

    @cached_property
    def digest(self) -> str:
        """Hash that is equal for two plans that move the same bytes in the same way."""
        hashes: dict[int, bytes] = {}  # by identity: many segments have the same holders
        for segment in self._segments:
            for holders in (segment.sources, segment.destinations):
                if id(holders) not in hashes:
                    hashes[id(holders)] = hashlib.sha256(repr(holders).encode()).digest()
        hashed = hashlib.sha256()
        for segment, choice in zip(self._segments, self._chosen):
            hashed.update(hashes[id(segment.sources)] + hashes[id(segment.destinations)])
            hashed.update(f"{segment.box} {segment.item_bytes}".encode() + choice.tobytes())
        return hashed.hexdigest()

    def copies(self, receiver: int) -> list[Copy]:
        """Return the copies for one receiver. Raises ValueError if two of its places overlap."""
        check_apart(self._to, receiver)
        return [
            copy
            for number, segment in enumerate(self._segments)
            for i, (rank, _) in enumerate(segment.destinations)
            if rank == receiver
            for copy in self._copies(number, i)
        ]

    def _copies(self, number: int, i: int) -> Iterator[Copy]:
        segment = self._segments[number]
        destination, there = segment.destinations[i]
        source, here = segment.sources[self._chosen[number][i]]
        for each in rows(segment.box, segment.item_bytes, here, there):
            yield Copy(
                source, destination, here.buffer, there.buffer, each.here, each.there, each.run, each.rows,
                each.here_stride, each.there_stride,
            )  # fmt: skip


def build(source: Layout, destination: Layout, *, segment_bytes: int = SEGMENT_BYTES) -> RefitPlan:
    """Build the plan. Raises ValueError, naming the tensor, if shapes or dtypes differ or no source holds a box."""
    held, wanted = _holders(source), _holders(destination)
    segments: list[_Segment] = []
    for name in wanted:
        _check_same(name, source, destination)
        tensor = destination.tensors[name]
        holders = {box: tuple(ranks) for box, ranks in held.get(name, {}).items()}
        givers = _Givers(name, list(holders), len(tensor.shape))
        for box, ranks in wanted[name].items():
            receivers = tuple(ranks)
            for part, giver in givers.cover(box):
                for piece in pieces(part, max(1, segment_bytes // tensor.item_bytes)):
                    took = size(piece) * tensor.item_bytes
                    segments.append(_Segment(piece, tensor.item_bytes, took, holders[giver], receivers))
    return RefitPlan(segments, _choose(segments, len(source.ranks)), len(source.ranks), destination)


def pieces(box: Box, limit: int) -> list[Box]:
    """Split a box into boxes of at most `limit` elements, cut along its first dimensions as evenly as possible."""
    if size(box) <= limit:
        return [box]
    for i, (start, stop) in enumerate(box):
        inner = size(box[i + 1 :])
        if stop - start == 1:
            continue
        count = min(stop - start, -(-size(box) // limit)) if inner <= limit else stop - start
        edges = [start + (stop - start) * n // count for n in range(count + 1)]
        cut = [(*box[:i], (a, b), *box[i + 1 :]) for a, b in pairwise(edges)]
        return [smaller for one in cut for smaller in pieces(one, limit)]
    return [box]


def _holders(layout: Layout) -> dict[str, dict[Box, list[tuple[int, Place]]]]:
    """Return the holders by tensor and box."""
    found: dict[str, dict[Box, list[tuple[int, Place]]]] = {}
    for rank, places in enumerate(layout.ranks):
        for place in places:
            found.setdefault(place.tensor, {}).setdefault(place.box, []).append((rank, place))
    return found


def _check_same(name: str, source: Layout, destination: Layout) -> None:
    here, there = source.tensors.get(name), destination.tensors[name]
    if here is None:
        raise ValueError(f"the destination needs {name!r}, which the source does not have")
    if here != there:
        raise ValueError(
            f"{name!r} is {here.dtype} {list(here.shape)} at the source and {there.dtype} {list(there.shape)} at the "
            "destination: bytes are copied as they are, never cast"
        )


class _Givers:
    """The boxes of one tensor that senders hold."""

    def __init__(self, name: str, boxes: Sequence[Box], dimensions: int) -> None:
        self._name, self._boxes = name, sorted(boxes)
        self._edges = np.array(self._boxes, np.int64).reshape(-1, dimensions, 2)
        low, high = self._edges[:, :, 0], self._edges[:, :, 1]
        meet = np.ones((len(boxes), len(boxes)), np.bool_)
        for i in range(dimensions):
            meet &= low[:, i, None] < high[:, i]
        self._apart = int((meet & meet.T).sum()) == len(boxes)

    def cover(self, box: Box) -> list[tuple[Box, Box]]:
        """Split a box into disjoint parts, each with the sender's box that contains it. Raises ValueError if a part is
        missing."""
        meeting, edges = self._meeting(box)
        if self._apart and (edges[:, :, 1] - edges[:, :, 0]).prod(1).sum() == size(box):
            parts = [tuple((start, stop) for start, stop in part) for part in edges.tolist()]
            return list(zip(parts, (self._boxes[i] for i in meeting)))
        found: list[tuple[Box, Box]] = []
        left = [box]
        for giver in (self._boxes[i] for i in meeting):
            rest: list[Box] = []
            for lacking in left:
                if (common := intersection(lacking, giver)) is None:
                    rest.append(lacking)
                else:
                    found.append((common, giver))
                    rest += without(lacking, common)
            left = rest
        if left:
            raise ValueError(f"no rank of the source holds {list(left[0])} of {self._name!r}")
        return found

    def _meeting(self, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the boxes that overlap this one, and the overlaps."""
        wanted = np.array(box, np.int64)
        low = np.maximum(self._edges[:, :, 0], wanted[:, 0])
        high = np.minimum(self._edges[:, :, 1], wanted[:, 1])
        meeting = np.flatnonzero((low < high).all(1))
        return meeting, np.stack([low[meeting], high[meeting]], 2)


def _summed(ranks: Sequence[int], took: np.ndarray, count: int) -> np.ndarray:
    """Return the bytes of each of `count` ranks: exact integer sums."""
    total = np.zeros(count, np.int64)
    np.add.at(total, np.array(ranks, np.int64), took)
    return total


def _choose(segments: Sequence[_Segment], senders: int) -> list[np.ndarray]:
    """Choose a source for each destination of each segment: largest segments first, each from the least-loaded
    sender."""
    chosen: list[np.ndarray] = [np.zeros(len(segment.destinations), np.int32) for segment in segments]
    load = np.zeros(senders, np.int64)
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, segment in enumerate(segments):
        ranks = tuple(rank for rank, _ in segment.sources)
        if len(ranks) == 1:
            load[ranks[0]] += segment.size * len(segment.destinations)
        else:
            alike.setdefault((-segment.size, ranks), []).append(number)
    for (negative, ranks), numbers in sorted(alike.items()):
        bytes_each = -negative
        counts = [len(segments[number].destinations) for number in numbers]
        shares = _filled(load[list(ranks)], bytes_each, sum(counts))
        load[list(ranks)] += shares * bytes_each
        order = np.concatenate([np.arange(share) for share in shares])  # round-robin: neighbors use different senders
        turns = np.repeat(np.arange(len(ranks)), shares)[np.argsort(order, kind="stable")]
        for number, part in zip(numbers, np.split(turns, np.cumsum(counts)[:-1])):
            chosen[number] = part.astype(np.int32)
    return chosen


def _filled(load: np.ndarray, bytes_each: int, count: int) -> np.ndarray:
    """Return how many of `count` equal segments each sender gets if each goes to the least-loaded one."""
    low, high = int(load.min()), int(load.max()) + bytes_each * count
    while high - low > 1:  # find the highest level that whole segments fill completely
        level = (low + high) // 2
        fits = int((np.maximum(level - load, 0) // bytes_each).sum()) <= count
        low, high = (level, high) if fits else (low, level)
    shares = np.maximum(low - load, 0) // bytes_each
    for _ in range(count - int(shares.sum())):
        shares[np.argmin(load + shares * bytes_each)] += 1
    return shares


def rows(box: Box, item_bytes: int, here: Place, there: Place) -> Iterator[Rows]:
    """Split a box into as few rows of bytes as possible."""
    offset, other_offset = _offset(box, here), _offset(box, there)
    dims: list[tuple[int, int, int]] = []  # extent and both strides; contiguous dimensions are merged
    for (start, stop), stride, other_stride in zip(box, here.strides, there.strides):
        extent = stop - start
        if extent == 1:
            continue
        if dims and dims[-1][1:] == (extent * stride, extent * other_stride):
            extent *= dims.pop()[0]
        dims.append((extent, stride, other_stride))
    run = item_bytes
    if dims and dims[-1][1:] == (item_bytes, item_bytes):
        run = dims.pop()[0] * item_bytes
    count, stride, other_stride = dims.pop() if dims else (1, run, run)
    for steps in product(*(range(extent) for extent, _, _ in dims)):
        yield Rows(
            offset + sum(step * dim[1] for step, dim in zip(steps, dims)),
            other_offset + sum(step * dim[2] for step, dim in zip(steps, dims)),
            run, count, stride, other_stride,
        )  # fmt: skip


def _offset(box: Box, place: Place) -> int:
    starts = zip(box, place.box, place.strides)
    return place.offset + sum((first - begin) * stride for (first, _), (begin, _), stride in starts)
