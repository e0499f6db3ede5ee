"""Which workers missed a heartbeat, and which are overdue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.executors.heartbeat import LOOKS, missed, overdue


@given(st.lists(st.frozensets(st.sampled_from("abc")), max_size=4 * LOOKS))
def test_overdue_is_who_was_late_at_every_look_of_a_deadline(looks: list[frozenset[str]]) -> None:
    counts: dict[str, int] = {}
    for late in looks:
        counts = missed(counts, late)
    last = looks[-LOOKS:]
    assert set(overdue(counts)) == {one for one in "abc" if len(last) == LOOKS and all(one in late for late in last)}


def test_one_answer_and_the_deadline_begins_anew() -> None:
    counts = missed({"a": LOOKS - 1, "b": LOOKS - 1}, ["b"])
    assert counts == {"b": LOOKS} and overdue(counts) == ["b"]
    assert missed(counts, ["a"]) == {"a": 1}
