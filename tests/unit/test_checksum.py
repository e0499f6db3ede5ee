"""The checksum of a tensor's bytes against the same sums in whole numbers, and what it must notice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops import checksum as module
from ops.checksum import checksum
from stages.backends.torch.weights import Hashes, weight_hash

MASK = (1 << 64) - 1


def mixed(word: int) -> int:
    word &= MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def by_hand(raw: bytes, block: int) -> bytes:
    """Word by word, in Python's numbers."""
    padded = raw + bytes(-len(raw) % 8)
    made = b""
    for seed in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F):
        total = len(raw)
        for position in range(len(padded) // 8):
            word = int.from_bytes(padded[8 * position : 8 * position + 8], "little")
            number, inside = divmod(position, block)
            total += word * (mixed(inside + seed) | 1) * (mixed(number + seed) | 1)
        made += (total & MASK).to_bytes(8, "little")
    return made


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    module._weights.cache_clear()
    monkeypatch.setattr(module, "BLOCK", 8)
    yield
    module._weights.cache_clear()


@given(st.binary(min_size=1, max_size=300))
@settings(max_examples=80, deadline=None)
def test_it_is_the_sum_by_hand(raw):
    assert checksum(torch.frombuffer(bytearray(raw), dtype=torch.uint8)) == by_hand(raw, 8)


@given(st.binary(min_size=2, max_size=300), st.data())
@settings(max_examples=80, deadline=None)
def test_one_bit_a_swap_or_another_length_shows(raw, data):
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    flipped = tensor.clone()
    flipped[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    first, second = (data.draw(st.integers(0, len(raw) - 1)) for _ in range(2))
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert checksum(flipped) != checksum(tensor)
    assert (checksum(swapped) == checksum(tensor)) == torch.equal(swapped, tensor)
    assert checksum(torch.cat([tensor, tensor.new_zeros(1)])) != checksum(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_it_is_of_bytes_whatever_the_dtype_shape_and_place(dtype):
    tensor = (torch.randn(5, 7) * 3).to(dtype)
    raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    assert checksum(tensor) == by_hand(raw, 8)
    shifted = torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:]  # begins where no word does
    assert checksum(shifted) == checksum(tensor)


def test_weights_hash_alike_in_any_order_and_differ_by_name():
    named = {"b": torch.ones(2), "a": torch.zeros(3)}
    hashes = Hashes()
    for name in sorted(named):
        hashes.add(name, named[name])
    assert hashes.together() == weight_hash(named)
    assert weight_hash({"c": named["b"], "a": named["a"]}) != weight_hash(named)
