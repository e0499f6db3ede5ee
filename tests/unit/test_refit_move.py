"""Executing the copies of a plan in memory, and the tiles that the programs of a kernel get."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.refit.layout import Layout
from ops.refit.move import Moves
from ops.refit.plan import Copy, build
from ops.refit.tiles import TILE_BYTES, in_turns, tiles, word_bytes
from tests.examples import few
from tests.unit.refit_layouts import buffers, filled, moves, on, sides


@given(sides())
@settings(max_examples=few(150), deadline=None)
def test_moved_twice_everything_is_in_its_place(pair: tuple[Layout, Layout]) -> None:
    source, destination = pair
    given_ = [on("cpu", memory) for memory in filled(source)]
    taken = [on("cpu", memory) for memory in buffers(destination)]
    plan = build(source, destination, segment_bytes=32)
    carried = [moves(plan, rank, given_, own) for rank, own in enumerate(taken)]
    assert [each.size for each in carried] == plan.received.tolist()
    for version in (1, 7):
        for memory in given_:
            for name in memory:
                memory[name] *= version
        for each in carried:
            each.run()
        for rank, memory in enumerate(filled(destination)):
            poison = buffers(destination)[rank]
            for name, wanted in memory.items():
                inside = filled(destination, mark=True)[rank][name]
                assert (taken[rank][name].numpy() == np.where(inside, wanted * np.uint8(version), poison[name])).all()


def test_a_copy_out_of_bounds_is_refused() -> None:
    copy = Copy(2, 0, "there", "here", 8, 0, 4, 3, 8, 4)
    short, long = torch.zeros(27, dtype=torch.uint8), torch.zeros(28, dtype=torch.uint8)
    Moves([copy], lambda _: long, lambda _: long)
    with pytest.raises(ValueError, match=r"source buffer 'there' of rank 2 has 27 bytes; a copy reaches byte 28"):
        Moves([copy], lambda _: short, lambda _: long)
    with pytest.raises(ValueError, match=r"destination buffer 'here' has 11 bytes; a copy reaches byte 12"):
        Moves([copy], lambda _: long, lambda _: long[:11])
    with pytest.raises(ValueError, match="it must be flat bytes"):
        Moves([copy], lambda _: long.view(torch.int32), lambda _: long)


DESCRIPTORS = st.tuples(
    st.integers(0, 3), st.integers(0, 40), st.integers(0, 40), st.integers(1, 9),
    st.sampled_from([1, 6, 64, TILE_BYTES // 2, TILE_BYTES, 2 * TILE_BYTES + 8]), st.integers(0, 3), st.integers(0, 3),
)  # fmt: skip


@given(st.lists(DESCRIPTORS, min_size=1, max_size=5))
@settings(max_examples=few(200), deadline=None)
def test_tiles_are_small_and_together_what_was_described(drawn: list[tuple[int, ...]]) -> None:
    described = np.array([(*row[:5], row[4] + 8 * row[5], row[4] + 8 * row[6]) for row in drawn])
    made = tiles(described)
    assert (made[:, 3] * made[:, 4] <= TILE_BYTES).all()

    def pairs(table: np.ndarray) -> list[tuple[int, ...]]:
        """Return every row as (key, first, second, bytes), with adjacent rows merged."""
        found: list[list[int]] = []
        rows = [
            (key, first + i * first_step, second + i * second_step, run)
            for key, first, second, rows, run, first_step, second_step in table.tolist()
            for i in range(rows)
        ]
        for key, first, second, run in sorted(rows):
            last = found[-1] if found else None
            if last and last[0] == key and (last[1] + last[3], last[2] + last[3]) == (first, second):
                last[3] += run
            else:
                found.append([key, first, second, run])
        return [tuple(row) for row in found]

    if len({row[0] for row in drawn}) == len(drawn):  # otherwise descriptors of one key may overlap
        assert pairs(made) == pairs(described)
    words = word_bytes(made)
    assert ((made[:, [1, 2, 4, 5, 6]] % words[:, None]) == 0).all()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 9))
def test_every_sender_has_its_turn_at_any_time(counts: list[int], turn: int) -> None:
    keys = np.repeat(np.arange(len(counts)), counts)
    order = in_turns(keys, np.full(len(keys), 10), turn)
    assert sorted(order.tolist()) == list(range(len(keys)))
    assert keys[order[0]] == turn % len(counts)
    for key, count in enumerate(counts):
        places = np.flatnonzero(keys[order] == key)
        done = (places + 1) / len(keys)
        share = np.arange(1, count + 1) / count
        assert (np.abs(done - share) <= 1 / count + len(counts) / len(keys)).all()
