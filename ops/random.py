"""Counter-based random numbers: a value is a pure function of its use, not of the values drawn before it.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), in numpy.
Knows no model and no device; numbers are the same on every machine.

    uniform(seed=0, stream=1, admission_N=[7, 7], index_N=[0, 1], tokens=16)     # [2, 16], in the open interval (0, 1)
    permutation(seed=0, stream=0, count=10)                                      # 0 to 9, shuffled

Counter words: (token // 2, index in the group, admission number, stream); key words: the seed, low half first. A
permutation has its own index word, so it never shares a block with `uniform`.
Legend: N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]  # each below 2**32

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_WORD = 2**32
_PERMUTATION_INDEX = _WORD - 1


def philox4x32(counter: Sequence[Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Run ten rounds of Philox4x32. Takes four counter words, broadcast against each other, and two key words; returns
    four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) % _WORD, (k1 + _WEYL[1]) % _WORD
    return c0, c1, c2, c3


def uniform(
    seed: int, stream: int, admission_N: Sequence[int], index_N: Sequence[int], tokens: int,
    start: int | Sequence[int] = 0,
) -> NDArray[np.float64]:  # fmt: skip
    """Return random numbers [N, tokens] in the open interval (0, 1), for `tokens` tokens of each sample from `start`,
    which is one number or one per sample.

    `seed` is below 2**64; `stream` separates uses; `admission_N` is the group's admission number, and `index_N` the
    sample's index in the group. Each value is (k + 1/2) / 2**52 with k of 52 random bits, so it is exact in float64 and
    never 0 or 1; rounded to float32, it may be 1. Raises ValueError outside these ranges.
    """
    admission, index = _words("admission_N", admission_N), _words("index_N", index_N, _PERMUTATION_INDEX)
    if admission.shape != index.shape:
        raise ValueError(f"admission_N has {len(admission)} entries and index_N {len(index)}; they must match")
    starts = np.array([start] if isinstance(start, int) else start, dtype=np.int64).reshape(-1)
    if len(starts) not in (1, len(admission)):
        raise ValueError(f"start has {len(starts)} entries, and there are {len(admission)} samples")
    first, last = (int(starts.min()), int(starts.max())) if len(starts) else (0, 0)
    if tokens < 0 or first < 0 or last + tokens > 2 * _WORD:
        raise ValueError(f"tokens {first} to {last + tokens} are not in 0 to 2**33")
    odd_N1 = (starts % 2)[:, None]
    blocks = np.arange((tokens + 1 + int(odd_N1.max(initial=0))) // 2)
    block = ((starts // 2)[:, None] + blocks).astype(np.uint64)
    bits = _bits(seed, stream, block, index[:, None], admission[:, None]) >> np.uint64(12)
    values = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return np.take_along_axis(values, np.broadcast_to(odd_N1 + np.arange(tokens), (len(admission), tokens)), axis=1)


def permutation(seed: int, stream: int, count: int) -> NDArray[np.int64]:
    """Return the numbers 0 to count - 1 in an order that is a pure function of (seed, stream, count)."""
    if not 0 <= count < _WORD:
        raise ValueError(f"count {count} is not in 0 to 2**32 - 1")
    block = np.arange((count + 1) // 2, dtype=np.uint64)[None, :]
    bits = _bits(seed, stream, block, np.full((1, 1), _PERMUTATION_INDEX, np.uint64), np.zeros((1, 1), np.uint64))
    return np.argsort(bits[0, :count], kind="stable").astype(np.int64)


def shuffled(seed: int, index: int, count: int) -> int:
    """Return item `index` of an endless stream over `count` items, with a different permutation in each epoch."""
    epoch, position = divmod(index, count)
    return int(_epoch(seed, epoch, count)[position])


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return permutation(seed, epoch, count)


def _bits(seed: int, stream: int, block: Words, index: Words, admission: Words) -> NDArray[np.uint64]:
    """Return 64-bit random words, [N, 2 * blocks]: two per Philox block."""
    if not 0 <= seed < _WORD**2:
        raise ValueError(f"seed {seed} is not in 0 to 2**64 - 1")
    w0, w1, w2, w3 = philox4x32((block, index, admission, _words("stream", [stream])), (seed % _WORD, seed // _WORD))
    pairs = np.stack(((w1 << _HALF) | w0, (w3 << _HALF) | w2), axis=-1)
    return pairs.reshape(pairs.shape[0], 2 * pairs.shape[1])


def _words(name: str, values: Sequence[int], end: int = _WORD) -> Words:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {array.dtype}, not whole numbers")
    if array.ndim != 1 or (array.size and (int(array.min()) < 0 or int(array.max()) >= end)):
        raise ValueError(f"{name} is not a flat list of whole numbers from 0 to {end - 1}")
    return array.astype(np.uint64)
