"""A checksum of a tensor's bytes where they lie, on a GPU without moving them: 128 bits that depend on every position.

Two sums over 8-byte words, modulo 2^64, each word times an odd weight that its position gives (multiply-shift hashing;
Dietzfelbinger et al., A Reliable Randomized Algorithm for the Closest-Pair Problem, 1997). An odd factor loses nothing,
so a single word that differs always shows; words that change places show because their weights differ. It detects
faults, not forgery.
"""

from __future__ import annotations

from functools import lru_cache

import torch

BLOCK = 1 << 22  # words whose products are in memory at a time
SEEDS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_MASK = (1 << 64) - 1


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> bytes:
    """16 bytes for the contents of a contiguous tensor of any dtype; the same on every device."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    if rest := -raw.numel() % 8:
        raw = torch.cat([raw, raw.new_zeros(rest)])
    elif raw.data_ptr() % 8:
        raw = raw.clone()
    words = raw.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for number, start in enumerate(range(0, len(words), BLOCK)):
        block = words[start : start + BLOCK]
        for one, seed in enumerate(SEEDS):
            inside = (block * _weights(seed, words.device)[: len(block)]).sum()
            sums[one] += inside * signed(_mixed(number + seed) | 1)
    length = tensor.numel() * tensor.element_size()
    return b"".join(((value + length) & _MASK).to_bytes(8, "little") for value in sums.tolist())


@lru_cache(maxsize=8)
def _weights(seed: int, device: torch.device) -> torch.Tensor:
    """An odd number for each position of a block."""
    positions = torch.arange(BLOCK, device=device)
    return (mixed_words(positions + signed(seed)) | 1).contiguous()


def mixed_words(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on each word."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> shift & ((1 << 64 - shift) - 1))) * signed(factor)
    return words ^ (words >> 31 & ((1 << 33) - 1))


def _mixed(word: int) -> int:
    """The same on a number."""
    word &= _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ word >> shift) * factor & _MASK
    return word ^ word >> 31


def signed(word: int) -> int:
    """As a 64-bit number with a sign."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word
