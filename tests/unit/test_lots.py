"""Splitting items into lots of bounded size."""

from hypothesis import given
from hypothesis import strategies as st

from ops.lots import lots


@given(st.lists(st.integers(0, 12)), st.integers(1, 20), st.integers(1, 5))
def test_lots_are_as_full_as_can_be_and_have_all_in_order(sizes: list[int], most: int, aligned: int) -> None:
    made = list(lots(enumerate(sizes), lambda item: item[1], most, aligned))
    assert [item for lot in made for item in lot] == list(enumerate(sizes))
    for lot, following in zip(made, [*made[1:], None]):
        *before, last = [size for _, size in lot]  # each but the last is padded
        end = sum(-(-size // aligned) * aligned for size in before)
        assert end + last <= most or len(lot) == 1
        assert not following or end + -(-last // aligned) * aligned + following[0][1] > most
