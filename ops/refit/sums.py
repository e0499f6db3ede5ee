"""Checksums of a model's tensors that do not depend on how ranks divide them: 128 bits each, by position.

    held = Sums(layout.tensors, layout.ranks[2], buffers).now()    # on each rank, of each box that it has
    digest(layout.tensors, [held, ...])                            # of all ranks: the same for every layout

A tensor's bytes, in the order of its canonical coordinates, are 8-byte words; a word counts times an odd number that
its position gives (multiply-shift hashing; Dietzfelbinger et al., A Reliable Randomized Algorithm for the Closest-Pair
Problem, 1997), and sums are modulo 2^64. So the sums of disjoint boxes add up to that of the tensor, even where a box
begins within a word; an odd factor loses nothing, so a word that differs always shows. It detects faults, not forgery.

A factor is that of the word's block times that of its place there, so that a GPU reads as fast as its memory gives.
Differences in the highest bits alone leave a product few bits to show in: the second sum has each word's halves
exchanged. What is published is copied in the pass that adds it up, as both would read all of it.
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
SEEDS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # of the two sums
BLOCK = 256  # words
KEPT_BYTES = 64 << 20  # of buffers on the CPU, up to which the factors of their words are kept


class Summed(msgspec.Struct, frozen=True, array_like=True):
    """The boxes that a rank holds, encoded, and the checksum of each: int64, two a box."""

    boxes: bytes
    sums: bytes


class Sums:
    """Of what lies in some places. Each `buffer` is flat bytes, all of them on one device.

    With `source`, which gives for each buffer another that is laid out as it is, or itself, the places are filled from
    there in the same pass. Raises ValueError where one is longer than the other.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], places: Sequence[Place], buffer: Callable[[str], torch.Tensor],
        source: Callable[[str], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._count = len(places)
        self._boxes = msgspec.msgpack.encode([(place.tensor, place.box) for place in places])
        self._kept = [buffer(place.buffer) for place in places]  # so that the addresses stay theirs
        self._sources = [source(place.buffer) for place in places] if source else self._kept
        for place, memory, filling in zip(places, self._kept, self._sources):
            if len(memory) != len(filling):
                raise ValueError(f"buffer {place.buffer!r} has {len(memory)} bytes, and its source {len(filling)}")
        self._device = self._kept[0].device if places else torch.device("cpu")
        tables = self.described(tensors, places)
        if self._device.type == "cuda":
            self._on_device = [(word, torch.from_numpy(table).to(self._device)) for word, table in tables]
        else:
            keeps = sum(memory.numel() for memory in set(self._kept)) <= KEPT_BYTES
            self._here = [_Tile(row, word, keeps) for word, table in tables for row in table.tolist()]

    def described(self, tensors: Mapping[str, Tensor], places: Sequence[Place]) -> list[tuple[int, np.ndarray]]:
        """By bytes of a word, the table that ops.refit.kernel.add goes through."""
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
        """Of the bytes that lie there now, once those of the source are there."""
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
        """Place, first byte in the tensor, address to read, rows, bytes of a run, and of the steps in the tensor and
        here."""
        for slot, (place, source) in enumerate(zip(places, self._sources)):
            tensor = tensors[place.tensor]
            canonical = dense(place.tensor, whole(tensor.shape), tensor.item_bytes, "")
            for each in rows(place.box, tensor.item_bytes, place, canonical):
                address = source.data_ptr() + each.here
                yield slot, each.there, address, each.rows, each.run, each.there_stride, each.here_stride


def _salt(name: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def _signed(word: int) -> int:
    """As a 64-bit number with a sign."""
    return word - (1 << 64) if word >> 63 else word


def _mixed(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014) on each
    of some uint64."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


class _Tile:
    """What a program of the kernel does, on the CPU. `keeps` has it keep the numbers that its positions give, which
    take three times its memory."""

    def __init__(self, row: list[int], word: int, keeps: bool) -> None:
        self.slot, self._salt, start, address, rows, run, step, here_step, further = row
        form = rows, run, here_step, word
        self._here = _words(address, *form)
        self._there = _words(address + further * word, *form) if further else None
        self._where = start, step, word
        self._kept = self._numbers() if keeps else None

    def now(self) -> np.ndarray:
        """Both sums."""
        if self._there is not None:
            self._there[:] = self._here
        (first, second), shift = self._kept or self._numbers()
        words = self._here.astype(np.uint64) << shift
        exchanged = words << np.uint64(32) | words >> np.uint64(32)
        return np.array([(words * first).sum(), (exchanged * second).sum()]).view(np.int64)

    def _numbers(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Of each word its factor in both sums, and by how many bits it is behind the start of 8 bytes."""
        start, step, word = self._where
        rows, run = self._here.shape
        byte = start + step * np.arange(rows)[:, None] + word * np.arange(run)
        block, place = np.divmod(byte // 8, BLOCK)
        factors = [_factor(block + self._salt, seed) * _factor(place, seed) for seed in SEEDS]
        return factors, (byte % 8 * 8).astype(np.uint64)


def _words(address: int, rows: int, run: int, step: int, word: int) -> np.ndarray:
    """Memory as an array of them [rows, run]."""
    raw = (ctypes.c_char * (((rows - 1) * step + run) * word)).from_address(address)
    memory = np.frombuffer(memoryview(raw), f"u{word}")
    return np.lib.stride_tricks.as_strided(memory, (rows, run), (step * word, word))


def _factor(numbers: np.ndarray, seed: int) -> np.ndarray:
    return _mixed(numbers.astype(np.uint64) + np.uint64(seed)) | np.uint64(1)


def digest(tensors: Mapping[str, Tensor], ranks: Sequence[Summed]) -> str:
    """sha256 over the checksums of all tensors, put together from what ranks hold.

    Raises ValueError, naming the tensor, where ranks that hold the same box have different bytes, or boxes are missing.
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
    """How the sums of ranks fit together: of each entry its box, and the first entry of the same box; the entries that
    are the first of their box, with their tensors; names of tensors, and how many elements the boxes have together."""

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
