"""Descriptors of strided bytes, cut into tiles of about one size, so that a kernel's programs all have as much to do.

A descriptor is a row of seven numbers: a key; an address on the first and on the second side; rows; bytes of a run; and
bytes from row to row on the first and on the second side.
"""

from __future__ import annotations

import numpy as np

TILE_BYTES = 64 << 10  # so few that programs end soon, and room is made for those of other streams
WORDS = (8, 4, 2, 1)  # bytes of a word that tiles are gone through in


def tiles(descriptors: np.ndarray) -> np.ndarray:
    """The same bytes in descriptors [N, 7] of at most TILE_BYTES."""
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
    """An order in which, at every moment, about the same share of each key's bytes has had its turn; the `turn`-th key
    is first each time."""
    known = np.unique(keys)
    share = np.zeros(len(keys))
    for place, key in enumerate(known):
        own = keys == key
        until = np.cumsum(sizes[own])
        share[own] = (until - sizes[own]) / until[-1] + (place - turn) % len(known) * 1e-9
    return np.argsort(share, kind="stable")


def word_bytes(described: np.ndarray) -> np.ndarray:
    """Of each descriptor, bytes of the largest word that all of it is a multiple of."""
    joint = np.bitwise_or.reduce(described[:, [1, 2, 4, 5, 6]], axis=1) | WORDS[0]
    return joint & -joint
