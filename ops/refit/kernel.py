"""Two Triton kernels over a table of tiles, one tile per program: one copies bytes, the other computes checksums and
can copy in the same pass.

A tile's words are numbered row by row, so every lane has work even if rows are short. The source may be on another GPU
of the machine, mapped over NVLink: the kernel only loads from it.
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
    """Same as `_mixed` in ops/refit/sums.py."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _factor(number, seed):
    return _mixed(number.to(tl.uint64) + seed.to(tl.uint64, bitcast=True)) | 1


@triton.jit
def _add(table, like, sums, first_seed, second_seed, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Go through the tensor block by block: a block has one factor, and a lane is at the same place in every block.
    `BLOCK` is in words of WORD bytes."""
    tile = table + tl.program_id(0).to(tl.int64) * 9
    slot, salt = tl.load(tile), tl.load(tile + 1)
    start, here = tl.load(tile + 2), tl.load(tile + 3).to(like.dtype)
    rows, run = tl.load(tile + 4).to(tl.int32), tl.load(tile + 5).to(tl.int32)
    step, here_step, further = tl.load(tile + 6), tl.load(tile + 7), tl.load(tile + 8)
    lane = tl.arange(0, BLOCK)
    first_sum = tl.zeros((BLOCK,), tl.uint64)
    second_sum = tl.zeros((BLOCK,), tl.uint64)
    for row in range(rows):
        begin = (start + row * step) // WORD
        for block in range(begin // BLOCK, (begin + run + BLOCK - 1) // BLOCK):
            column = (block * BLOCK - begin).to(tl.int32) + lane
            inside = (column >= 0) & (column < run)
            place = here + row * here_step + column
            value = tl.load(place, mask=inside, other=0)
            if further != 0:
                tl.store(place + further, value, mask=inside)
            if WORD == 8:
                value = value.to(tl.uint64, bitcast=True)
            else:
                value = (value.to(tl.uint64) & ((1 << (8 * WORD)) - 1)) << (lane * WORD % 8 * 8).to(tl.uint64)
            first_sum += value * _factor(block + salt, first_seed)
            second_sum += (value << 32 | value >> 32) * _factor(block + salt, second_seed)
    within = lane * WORD // 8
    first, second = first_sum * _factor(within, first_seed), second_sum * _factor(within, second_seed)
    tl.atomic_add(sums + slot * 2, tl.sum(first, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(sums + slot * 2 + 1, tl.sum(second, 0).to(tl.int64, bitcast=True))


def move(table: torch.Tensor, word: int) -> None:
    """Copy by a table, in order on the current stream. The table is int64 [N, 6]: destination address, source address,
    rows; then in words of `word` bytes: run, destination stride, source stride."""
    _move[(len(table),)](table, torch.empty(0, dtype=_TYPES[word], device=table.device), AT_ONCE=AT_ONCE)


def add(table: torch.Tensor, word: int, sums: torch.Tensor, seeds: tuple[int, int], block: int) -> None:
    """Add the checksums of a table's tiles to `sums` (int64 [slots, 2]), see ops.refit.sums; `block` is in 8-byte
    words.

    The table is int64 [N, 9]: slot, salt, first byte in the tensor, address, rows, words per run, row stride in the
    tensor in bytes, row stride in memory in words, and the distance in words to the copy's destination, or 0."""
    like = torch.empty(0, dtype=_TYPES[word], device=table.device)
    lanes = block * 8 // word
    _add[(len(table),)](table, like, sums, *seeds, WORD=word, BLOCK=lanes, num_warps=max(1, lanes // 256))
