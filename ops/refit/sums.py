"""Layout-independent checksums of a model's tensors: 128 bits each, by position.

    held = Sums(layout.tensors, layout.ranks[2], buffers).now()    # on each rank, for each box that it has
    digest(layout.tensors, [held, ...])                            # over all ranks: the same for every layout

A tensor's bytes, in canonical coordinate order, are 8-byte words. Each word is multiplied by an odd number derived from
its position (multiply-shift hashing; Dietzfelbinger et al., A Reliable Randomized Algorithm for the Closest-Pair
Problem, 1997), and sums are modulo 2^64. So the sums of disjoint boxes add up to the tensor's, even if a box begins
inside a word. An odd factor is invertible, so a single differing word always shows. It detects faults, not forgery.

A factor is the product of the word's block factor and the factor of its place in the block, so a GPU reads at memory
speed. A difference only in the highest bits leaves few bits of a product to show it, so the second sum swaps each
word's halves. Publishing copies in the same pass, since both read all of it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import msgspec
import numpy as np
import torch

from ops.refit.layout import Box, Place, Tensor, dense, size, whole
from ops.refit.plan import rows
from ops.refit.tiles import WORDS, tiles, word_bytes

Held = tuple[str, Box]
SEEDS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # for the two sums
BLOCK = 256  # words
KEPT_BYTES = 64 << 20  # up to this size of CPU buffers, the factors of their words are kept


class Summed(msgspec.Struct, frozen=True, array_like=True):
    """The encoded boxes that a rank holds, and their checksums: two int64 per box."""

    boxes: bytes
    sums: bytes


class Sums:
    """Checksums of the bytes in some places. Each `buffer` is flat bytes, all on one device.

    `source` maps each buffer to another with the same layout, or to itself; the places are filled from there in the
    same pass. Raises ValueError if their lengths differ.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], places: Sequence[Place], buffer: Callable[[str], torch.Tensor],
        source: Callable[[str], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._count = len(places)
        self._boxes = msgspec.msgpack.encode([(place.tensor, place.box) for place in places])
        self._kept = [buffer(place.buffer) for place in places]  # keeps the addresses valid
        self._sources = [source(place.buffer) for place in places] if source else self._kept
        for place, memory, filling in zip(places, self._kept, self._sources):
            if len(memory) != len(filling):
                raise ValueError(f"buffer {place.buffer!r} has {len(memory)} bytes, but its source has {len(filling)}")
        self._device = self._kept[0].device if places else torch.device("cpu")
        tables = self.described(tensors, places)
        if self._device.type == "cuda":
            self._on_device = [(word, torch.from_numpy(table).to(self._device)) for word, table in tables]
        else:
            keeps = sum(memory.numel() for memory in set(self._kept)) <= KEPT_BYTES
            self._here = [_Tile(row, word, keeps) for word, table in tables for row in table.tolist()]

    def described(self, tensors: Mapping[str, Tensor], places: Sequence[Place]) -> list[tuple[int, np.ndarray]]:
        """Build the tables for ops.refit.kernel.add, by word size."""
        made = tiles(np.array(list(self._descriptors(tensors, places)), np.int64).reshape(-1, 7))
        salts = np.array([_salt(place.tensor) for place in places], np.int64)[made[:, 0]]
        apart = [memory.data_ptr() - filling.data_ptr() for memory, filling in zip(self._kept, self._sources)]
        further = np.array(apart, np.int64)[made[:, 0]]
        words = word_bytes(np.column_stack([made[:, :2], made[:, 2] | further, made[:, 3:]]))
        tables: list[tuple[int, np.ndarray]] = []
        for word in WORDS:
            if (own := words == word).any():
                table = np.column_stack([made[own, :1], salts[own], made[own, 1:], further[own]])
                tables.append((word, table // np.array([1, 1, 1, 1, 1, word, 1, word, word])))
        return tables

    def now(self) -> Summed:
        """Copy from the source, if any, and compute the checksums of the current bytes."""
        if self._device.type == "cuda":
            from ops.refit.kernel import add

            on_device = torch.zeros((self._count, 2), dtype=torch.int64, device=self._device)
            for word, table in self._on_device:
                add(table, word, on_device, (_signed(SEEDS[0]), _signed(SEEDS[1])), BLOCK)
            sums = on_device.cpu().numpy()
        else:
            sums = np.zeros((self._count, 2), np.int64)
            for tile in self._here:
                sums[tile.slot] += tile.now()
        return Summed(self._boxes, sums.tobytes())

    def _descriptors(self, tensors: Mapping[str, Tensor], places: Sequence[Place]) -> Iterator[tuple[int, ...]]:
        """Yield (slot, first byte in the tensor, address to read, rows, run, row stride in the tensor, row stride in
        memory), in bytes."""
        for slot, (place, source) in enumerate(zip(places, self._sources)):
            tensor = tensors[place.tensor]
            canonical = dense(place.tensor, whole(tensor.shape), tensor.item_bytes, "")
            for each in rows(place.box, tensor.item_bytes, place, canonical):
                address = source.data_ptr() + each.here
                yield slot, each.there, address, each.rows, each.run, each.there_stride, each.here_stride


def _salt(name: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def _signed(word: int) -> int:
    """Reinterpret as a signed 64-bit number."""
    return word - (1 << 64) if word >> 63 else word


def _mixed(words: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 finalizer (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014),
    elementwise on uint64."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


class _Tile:
    """One program of the kernel, on the CPU. `keeps` caches the factors of its positions, which take three times the
    tile's memory."""

    def __init__(self, row: list[int], word: int, keeps: bool) -> None:
        self.slot, self._salt, start, address, rows, run, step, here_step, further = row
        form = rows, run, here_step, word
        self._here = _words(address, *form)
        self._there = _words(address + further * word, *form) if further else None
        self._where = start, step, word
        self._kept = self._numbers() if keeps else None

    def now(self) -> np.ndarray:
        """Compute both sums."""
        if self._there is not None:
            self._there[:] = self._here
        (first, second), shift = self._kept or self._numbers()
        words = self._here.astype(np.uint64) << shift
        exchanged = words << np.uint64(32) | words >> np.uint64(32)
        return np.array([(words * first).sum(), (exchanged * second).sum()]).view(np.int64)

    def _numbers(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Return each word's factors in both sums and its bit offset within 8 bytes."""
        start, step, word = self._where
        rows, run = self._here.shape
        byte = start + step * np.arange(rows)[:, None] + word * np.arange(run)
        block, place = np.divmod(byte // 8, BLOCK)
        factors = [_factor(block + self._salt, seed) * _factor(place, seed) for seed in SEEDS]
        return factors, (byte % 8 * 8).astype(np.uint64)


def _words(address: int, rows: int, run: int, step: int, word: int) -> np.ndarray:
    """View memory as an array of words [rows, run]."""
    raw = (ctypes.c_char * (((rows - 1) * step + run) * word)).from_address(address)
    memory = np.frombuffer(memoryview(raw), f"u{word}")
    return np.lib.stride_tricks.as_strided(memory, (rows, run), (step * word, word))


def _factor(numbers: np.ndarray, seed: int) -> np.ndarray:
    return _mixed(numbers.astype(np.uint64) + np.uint64(seed)) | np.uint64(1)


def digest(tensors: Mapping[str, Tensor], ranks: Sequence[Summed]) -> str:
    """Return the sha256 over the checksums of all tensors, combined from all ranks.

    Raises ValueError, naming the tensor, if holders of the same box have different bytes or boxes are missing.
    """
    scheme = _scheme(tuple(rank.boxes for rank in ranks))
    sums = np.concatenate([np.frombuffer(rank.sums, np.int64).reshape(-1, 2) for rank in ranks])
    differing = np.flatnonzero((sums != sums[scheme.first]).any(1))
    if len(differing):
        name, box = scheme.held[scheme.box[differing[0]]]
        raise ValueError(f"ranks that hold {list(box)} of {name!r} have different bytes there")
    totals = np.zeros((len(scheme.names), 2), np.int64)
    np.add.at(totals, scheme.tensor, sums[scheme.once])
    found = dict(zip(scheme.names, zip(scheme.sizes.tolist(), totals.tolist())))
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        held, total = found.get(name, (0, [0, 0]))
        if held != prod(tensor.shape):
            raise ValueError(f"ranks hold {held} elements of {name!r}, which has {prod(tensor.shape)}")
        hashed.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0{total}\n".encode())
    return hashed.hexdigest()


@dataclass(frozen=True)
class _Scheme:
    """How ranks' sums combine. For each entry: its box, and the first entry of that box. For the first entries: their
    index and tensor. For each tensor: its name and the total elements of its boxes."""

    held: list[Held]
    box: np.ndarray
    first: np.ndarray
    once: np.ndarray
    tensor: np.ndarray
    names: list[str]
    sizes: np.ndarray


@lru_cache(maxsize=8)
def _scheme(ranks: tuple[bytes, ...]) -> _Scheme:
    entries = [held for boxes in ranks for held in msgspec.msgpack.decode(boxes, type=list[Held])]
    held: dict[Held, int] = {}
    box = np.array([held.setdefault(entry, len(held)) for entry in entries], np.int64)
    _, once = np.unique(box, return_index=True)
    names = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in held))}
    tensor = np.array([names[name] for name, _ in held], np.int64)
    sizes = np.zeros(len(names), np.int64)
    np.add.at(sizes, tensor, [size(each) for _, each in held])
    return _Scheme(list(held), box, once[box], once, tensor, list(names), sizes)
