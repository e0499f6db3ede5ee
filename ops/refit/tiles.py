"""Cuts descriptors of strided bytes into tiles of similar size, so that a kernel's programs have equal work.

A descriptor is a row of seven numbers: key, first address, second address, rows, bytes per run, first row stride,
second row stride.
"""

from __future__ import annotations

import numpy as np

TILE_BYTES = 64 << 10  # small, so programs end soon and make room for other streams
WORDS = (8, 4, 2, 1)  # word sizes in bytes, largest first


def tiles(descriptors: np.ndarray) -> np.ndarray:
    """Split descriptors [N, 7] into ones of at most TILE_BYTES."""
    made = [np.zeros((0, 7), np.int64)]
    for key, first, second, rows, run, first_step, second_step in descriptors.tolist():
        if first_step == second_step == run:
            rows, run = 1, rows * run
        if run > TILE_BYTES:
            inside = np.arange(0, run, TILE_BYTES)
            line = np.repeat(np.arange(rows), len(inside))
            at, sizes = np.tile(inside, rows), np.tile(np.minimum(TILE_BYTES, run - inside), rows)
            columns = [first + line * first_step + at, second + line * second_step + at, 1, sizes, sizes, sizes]
        else:
            line = np.arange(0, rows, TILE_BYTES // run)
            counts = np.minimum(TILE_BYTES // run, rows - line)
            columns = [
                first + line * first_step, second + line * second_step, counts, run, first_step, second_step,
            ]  # fmt: skip
        made.append(np.stack(np.broadcast_arrays(key, *columns), 1))
    return np.concatenate(made)


def in_turns(keys: np.ndarray, sizes: np.ndarray, turn: int) -> np.ndarray:
    """Return an order that interleaves keys evenly: every prefix has about the same share of each key's bytes. The
    `turn`-th key goes first each time."""
    known = np.unique(keys)
    share = np.zeros(len(keys))
    for place, key in enumerate(known):
        own = keys == key
        until = np.cumsum(sizes[own])
        share[own] = (until - sizes[own]) / until[-1] + (place - turn) % len(known) * 1e-9
    return np.argsort(share, kind="stable")


def word_bytes(described: np.ndarray) -> np.ndarray:
    """Return, for each descriptor, the largest word size that divides all its numbers."""
    joint = np.bitwise_or.reduce(described[:, [1, 2, 4, 5, 6]], axis=1) | WORDS[0]
    return joint & -joint
