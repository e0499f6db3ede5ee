"""The cache in front of TransferQueue: bounded in bytes, least recently used first, no caller memory kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data_plane.cache import OVERHEAD_BYTES, RowCache
from pipeline.data_plane.rows import Block


def block(rows: int, entries: int, value: float = 0.0) -> Block:
    return Block(torch.full((rows * entries,), value), [entries] * rows)


def size(rows: int, entries: int) -> int:
    return rows * (4 * entries + OVERHEAD_BYTES)


def test_copies_in_and_out():
    cache = RowCache(10**6)
    mine = block(2, 3, 1.0)
    cache.keep("p", ["a", "b"], {"x": mine})
    mine.values.zero_()
    cache.get("p", ["b"], ["x"])["x"].values.zero_()
    assert cache.get("p", ["b", "a"], ["x"])["x"].values.tolist() == [1.0] * 6


def test_serves_only_fields_that_all_rows_have():
    cache = RowCache(10**6)
    cache.keep("p", ["a", "b"], {"x": block(2, 1)})
    cache.keep("p", ["a"], {"y": block(1, 1)})
    assert set(cache.get("p", ["a", "b"], ["x", "y"])) == {"x"}
    assert set(cache.get("p", ["a"], ["x", "y"])) == {"x", "y"}
    assert cache.get("q", ["a"], ["x"]) == {} and cache.get("p", ["a", "c"], ["x"]) == {}


def test_drops_what_was_used_longest_ago():
    cache = RowCache(2 * size(1, 100))
    for row in "ab":
        cache.keep("p", [row], {"x": block(1, 100)})
    cache.get("p", ["a"], ["x"])
    cache.keep("p", ["c"], {"x": block(1, 100)})
    assert [bool(cache.get("p", [row], ["x"])) for row in "abc"] == [True, False, True]


def test_capacity_zero_keeps_nothing_and_large_blocks_are_left_out():
    for cache in (RowCache(0), RowCache(size(1, 100) - 1)):
        cache.keep("p", ["a"], {"x": block(1, 100)})
        assert cache.size_bytes == 0 and not cache.get("p", ["a"], ["x"])


def test_memory_of_a_put_counts_until_its_last_row_goes():
    cache = RowCache(10**6)
    cache.keep("p", ["a", "b"], {"x": block(2, 100)})
    cache.forget(["a"])
    assert cache.size_bytes == size(2, 100)
    cache.forget(["b", "unknown"])
    assert cache.size_bytes == 0


@pytest.mark.parametrize("forget", [lambda cache: cache.forget(["a"]), RowCache.forget_all])
def test_what_is_forgotten_while_it_is_fetched_is_not_kept(forget):
    cache = RowCache(10**6)
    with cache.fetching() as gone, cache.fetching() as other:
        forget(cache)
        cache.keep("p", ["a", "b"], {"x": block(2, 100)}, gone)
        cache.keep("p", ["a"], {"x": block(1, 100)}, other)
        assert cache.size_bytes == 0
    cache.keep("p", ["a"], {"x": block(1, 100)})
    assert cache.get("p", ["a"], ["x"])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(0, 60), st.booleans()), max_size=60))
def test_bound_holds_and_the_books_balance(steps):
    cache = RowCache(3000)
    for first, rows, entries, forget in steps:
        names = [str(first + i) for i in range(rows)]
        if forget:
            cache.forget(names)
            assert not cache.get("p", names, ["x"])
        else:
            cache.keep("p", names, {"x": block(rows, entries)})
        assert 0 <= cache.size_bytes <= 3000
    cache.forget([str(i) for i in range(12)])
    assert cache.size_bytes == 0
