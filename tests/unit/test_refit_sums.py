"""Checksums that are independent of the layout and reveal every byte that differs."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.refit import sums
from ops.refit.layout import Layout, Place, Tensor, dense, whole
from ops.refit.sums import Sums, digest
from tests.examples import few
from tests.unit.refit_layouts import buffers, filled, on, shifted, sides, view


def told(layout: Layout, memory: list[dict[str, np.ndarray]]) -> str:
    """Return the digest of the memory."""
    held = [
        Sums(layout.tensors, places, {name: torch.from_numpy(a) for name, a in own.items()}.__getitem__).now()
        for places, own in zip(layout.ranks, memory)
    ]
    return digest(layout.tensors, held)


@pytest.mark.parametrize("kept_bytes", [0, sums.KEPT_BYTES])
@given(pair=sides())
@settings(max_examples=few(100), deadline=None)
def test_the_digest_is_the_same_in_every_layout(kept_bytes: int, pair: tuple[Layout, Layout]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "KEPT_BYTES", kept_bytes)
        patch.setattr(sums, "BLOCK", 4)
        assert told(pair[0], filled(pair[0])) == told(pair[1], filled(pair[1]))


@given(sides(), st.data())
@settings(max_examples=few(150), deadline=None)
def test_another_byte_shows(pair: tuple[Layout, Layout], data: st.DataObject) -> None:
    layout, memory = pair[0], filled(pair[0])
    before = told(layout, memory)
    rank = data.draw(st.sampled_from([rank for rank, places in enumerate(layout.ranks) if places]))
    place = data.draw(st.sampled_from(layout.ranks[rank]))
    held = view(memory[rank][place.buffer], place, layout.tensors[place.tensor].item_bytes)
    at = tuple(data.draw(st.integers(0, extent - 1)) for extent in held.shape)
    held[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert told(layout, memory) != before
    except ValueError as error:  # another rank holds the same box
        assert "have different bytes there" in str(error)


@given(sides(), st.integers(0, 8))
@settings(max_examples=few(100), deadline=None)
def test_a_source_fills_the_places_and_nothing_else(pair: tuple[Layout, Layout], shift: int) -> None:
    layout = pair[0]
    for places, memory, made in zip(layout.ranks, filled(layout), buffers(layout)):
        held, copies = {name: shifted(a, shift) for name, a in memory.items()}, on("cpu", made)
        found = Sums(layout.tensors, places, copies.__getitem__, held.__getitem__)
        for _ in range(2):
            assert found.now() == Sums(layout.tensors, places, held.__getitem__).now()
            assert all(np.array_equal(made[name], memory[name]) for name in memory)  # poison outside places
            for place in places:
                view(made[place.buffer], place, layout.tensors[place.tensor].item_bytes)[...] = 0


def test_a_source_of_another_length_is_refused() -> None:
    tensors, memory = {"t": Tensor((4,), "uint8")}, torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="buffer 'own' has 4 bytes, but its source has 3"):
        Sums(tensors, [dense("t", whole((4,)), 1, "own")], lambda _: memory, lambda _: memory[:3])


@given(st.binary(min_size=1, max_size=9 * sums.BLOCK))
@settings(max_examples=few(60), deadline=None)
def test_they_are_the_sums_by_hand(raw: bytes) -> None:
    tensors = {"t": Tensor((len(raw),), "uint8")}
    memory = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    found = Sums(tensors, [dense("t", whole((len(raw),)), 1, "t")], lambda _: memory).now()
    salt, mask = int.from_bytes(hashlib.sha256(b"t").digest()[:8], "little"), (1 << 64) - 1

    def mixed(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
        return word ^ word >> 31

    padded, wanted = raw + bytes(-len(raw) % 8), [0, 0]
    for position in range(len(padded) // 8):
        block, place = divmod(position, sums.BLOCK)
        word = int.from_bytes(padded[8 * position : 8 * position + 8], "little")
        for i, seed in enumerate(sums.SEEDS):
            wanted[i] += word * (mixed(block + salt + seed & mask) | 1) * (mixed(place + seed & mask) | 1)
            word = word >> 32 | word << 32 & mask
    assert np.frombuffer(found.sums, np.uint64).tolist() == [value & mask for value in wanted]


@pytest.mark.parametrize("shape", [(6,), (3, 5), (4, 8), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8", "int64"])
def test_elements_that_change_places_show(shape: tuple[int, ...], dtype: str) -> None:
    tensors = {"t": Tensor(shape, dtype)}
    layout = Layout(tensors, [[dense("t", whole(shape), tensors["t"].item_bytes, "t")]])
    (memory,) = filled(layout)
    before = told(layout, [memory])
    elements = view(memory["t"], layout.ranks[0][0], tensors["t"].item_bytes).reshape(-1, tensors["t"].item_bytes)
    changed = elements.copy()
    changed[[0, -1]] = changed[[-1, 0]]
    assert told(layout, [{"t": changed.ravel()}]) != before


@pytest.mark.parametrize("bit", range(64))
def test_one_bit_of_any_two_words_shows(bit: int) -> None:
    """Including the highest bit, of which a product keeps a single bit, so that two of them could cancel out."""
    words = np.zeros(2 * sums.BLOCK + 2, np.uint64)
    tensors = {"t": Tensor(words.shape, "int64")}
    held = Sums(tensors, [dense("t", whole(words.shape), 8, "t")], lambda _: torch.from_numpy(words.view(np.uint8)))
    found = set()
    for other in range(1, len(words)):
        words[:] = 0
        words[[0, other]] = 1 << bit
        found.add(held.now().sums)
    assert len(found) == len(words) - 1
    assert bytes(16) not in found


def test_two_tensors_with_each_others_bytes_show() -> None:
    layout = Layout({n: Tensor((4,), "float32") for n in "ab"}, [[dense(n, ((0, 4),), 4, n) for n in "ab"]])
    first, second = np.arange(16, dtype=np.uint8), np.arange(16, 32, dtype=np.uint8)
    assert told(layout, [{"a": first, "b": second}]) != told(layout, [{"a": second, "b": first}])


def test_a_missing_box_is_told_by_name() -> None:
    layout = Layout({"t": Tensor((4,), "float32")}, [[Place("t", ((0, 3),), "b", 0, (4,))]])
    with pytest.raises(ValueError, match="ranks hold 3 elements of 't', which has 4"):
        told(layout, [{"b": np.zeros(16, np.uint8)}])
