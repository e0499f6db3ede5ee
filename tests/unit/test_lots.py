"""Splitting items into lots of bounded size."""

from hypothesis import given
from hypothesis import strategies as st

from ops.lots import lots


@given(st.lists(st.integers(0, 12)), st.integers(1, 20))
def test_lots_are_as_full_as_can_be_and_have_all_in_order(sizes: list[int], most: int) -> None:
    made = list(lots(enumerate(sizes), lambda item: item[1], most))
    assert [item for lot in made for item in lot] == list(enumerate(sizes))
    totals = [sum(size for _, size in lot) for lot in made]
    for lot, total in zip(made, totals):
        assert lot
        assert total <= most or len(lot) == 1
    for total, following in zip(totals, made[1:]):
        assert total + following[0][1] > most
