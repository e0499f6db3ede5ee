"""The two kernels that go through a table of tiles, one a program, in Triton: one moves bytes, the other adds them up.

A tile's words are numbered row by row, so that every lane has one however short the rows are. What is moved may lie on
another GPU of the machine that is mapped here (NVLink): the kernel only loads there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

AT_ONCE = 1024  # words
_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit
def _move(table, like, AT_ONCE: tl.constexpr):
    tile = table + tl.program_id(0).to(tl.int64) * 6
    there, here = tl.load(tile).to(like.dtype), tl.load(tile + 1).to(like.dtype)
    run = tl.load(tile + 3).to(tl.int32)
    total = tl.load(tile + 2).to(tl.int32) * run
    there_step, here_step = tl.load(tile + 4), tl.load(tile + 5)
    for first in range(0, total, AT_ONCE):
        word = first + tl.arange(0, AT_ONCE)
        row = word // run
        column = word - row * run
        value = tl.load(here + row * here_step + column, mask=word < total)
        tl.store(there + row * there_step + column, value, mask=word < total)


@triton.jit
def _mixed(word):
    """That of ops/refit/sums.py."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _add(table, like, sums, first_seed, second_seed, WORD: tl.constexpr, AT_ONCE: tl.constexpr):
    tile = table + tl.program_id(0).to(tl.int64) * 8
    slot, salt = tl.load(tile), tl.load(tile + 1).to(tl.uint64, bitcast=True)
    start, here = tl.load(tile + 2), tl.load(tile + 3).to(like.dtype)
    run = tl.load(tile + 5).to(tl.int32)
    total = tl.load(tile + 4).to(tl.int32) * run
    step, here_step = tl.load(tile + 6), tl.load(tile + 7)
    first_sum = tl.zeros((AT_ONCE,), tl.uint64)
    second_sum = tl.zeros((AT_ONCE,), tl.uint64)
    for first in range(0, total, AT_ONCE):
        word = first + tl.arange(0, AT_ONCE)
        row = word // run
        column = word - row * run
        value = tl.load(here + row * here_step + column, mask=word < total, other=0)
        value = value.to(tl.uint64, bitcast=True) if WORD == 8 else value.to(tl.uint64) & ((1 << (8 * WORD)) - 1)
        byte = start + row * step + column * WORD
        value = value << ((byte % 8) * 8).to(tl.uint64)
        position = (byte // 8).to(tl.uint64) + salt
        first_sum += value * (_mixed(position + first_seed.to(tl.uint64, bitcast=True)) | 1)
        second_sum += value * (_mixed(position + second_seed.to(tl.uint64, bitcast=True)) | 1)
    tl.atomic_add(sums + slot * 2, tl.sum(first_sum, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(sums + slot * 2 + 1, tl.sum(second_sum, 0).to(tl.int64, bitcast=True))


def move(table: torch.Tensor, word: int) -> None:
    """Move what a table says (int64 [N, 6]: address there, address here, rows, and in words of `word` bytes: a run, the
    step there, the step here), in order on the current stream."""
    _move[(len(table),)](table, torch.empty(0, dtype=_TYPES[word], device=table.device), AT_ONCE=AT_ONCE)


def add(table: torch.Tensor, word: int, sums: torch.Tensor, seeds: tuple[int, int]) -> None:
    """Add what a table says to `sums` (int64 [slots, 2]), as ops.refit.sums describes.

    The table is int64 [N, 8]: slot, salt, first byte in the tensor, address, rows, words of a run, and from row to row
    bytes in the tensor and words here."""
    like = torch.empty(0, dtype=_TYPES[word], device=table.device)
    _add[(len(table),)](table, like, sums, *seeds, WORD=word, AT_ONCE=AT_ONCE)
