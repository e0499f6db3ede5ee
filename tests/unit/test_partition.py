"""Packing into rows: modified first-fit decreasing, and the choice among the candidates."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.declare.partition import _best_fit, _by_class, _first_fit, _modified_first_fit, rows_within
from tests.examples import few


def descending(sizes):
    """Return the items of these sizes, largest first."""
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def check_rows(rows, sizes, capacity):
    """Check that every item is in one row, no row is empty and none exceeds the capacity."""
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    assert all(row and sum(sizes[i] for i in row) <= capacity for row in rows)


items = st.lists(st.integers(0, 120), min_size=1, max_size=50)


@settings(max_examples=few(200), deadline=None)
@given(items, st.integers(0, 40))
def test_modified_first_fit_holds_every_item_once(sizes, above):
    capacity = max(max(sizes), 1) + above
    rows = _modified_first_fit(descending(sizes), sizes, capacity)
    check_rows(rows, sizes, capacity)
    assert _modified_first_fit(descending(sizes), sizes, capacity) == rows


@settings(max_examples=few(150), deadline=None)
@given(st.lists(st.lists(st.integers(1, 59), min_size=1, max_size=4, unique=True), min_size=1, max_size=12))
def test_modified_first_fit_stays_within_its_bound(cuts):
    """Full rows of 60, each cut into pieces: the fewest rows are known. The bound is 71/60 of them plus 31/6."""
    sizes = [stop - start for row in cuts for start, stop in pairwise([0, *sorted(row), 60])]
    assert len(_modified_first_fit(descending(sizes), sizes, 60)) <= 71 / 60 * len(cuts) + 31 / 6


@settings(max_examples=few(200), deadline=None)
@given(items, st.integers(0, 40))
def test_the_chosen_rows_are_never_more_than_any_candidate_makes(sizes, above):
    capacity = max(max(sizes), 1) + above
    order = descending(sizes)
    rows = rows_within(capacity, range(len(sizes)), sizes, sizes)
    check_rows(rows, sizes, capacity)
    candidates = (
        _best_fit(order, sizes, capacity),
        _first_fit(order, sizes, capacity, len(sizes)),
        _modified_first_fit(order, sizes, capacity),
    )
    assert len(rows) <= min(map(len, candidates))


def test_the_classes_are_a_half_a_third_and_a_sixth_of_the_capacity():
    sizes = [60, 31, 30, 21, 20, 11, 10, 1, 0]
    assert [[sizes[i] for i in each] for each in _by_class(range(9), sizes, 60)] == [
        [60, 31],
        [30, 21],
        [20, 11],
        [10, 1, 0],
    ]


def test_each_phase_by_hand():
    """Capacity 60: 35 takes the medium 25, 38 takes both 11; a row of its own holds the rest."""
    sizes = [38, 35, 25, 20, 11, 11, 10, 9]
    rows = _modified_first_fit(descending(sizes), sizes, 60)
    assert [sorted(sizes[i] for i in row) for row in rows] == [[11, 11, 38], [25, 35], [9, 10, 20]]
    rows = _modified_first_fit(descending([35, 10, 9, 5, 3]), [35, 10, 9, 5, 3], 60)
    assert rows == [[0, 1, 2, 3], [4]], "the largest that fits, until none does"


def test_two_small_items_go_beside_a_large_one_where_first_and_best_fit_waste_the_room():
    sizes = [62, 25, 45, 29, 18, 17]
    assert len(_best_fit(descending(sizes), sizes, 100)) == len(_first_fit(descending(sizes), sizes, 100, 6)) == 3
    assert len(_modified_first_fit(descending(sizes), sizes, 100)) == 2
    assert len(rows_within(100, range(6), sizes, sizes)) == 2
