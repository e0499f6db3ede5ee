"""Parameter rules: which values are valid, and the problem reported for an invalid one."""

from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.declare.parameters import Rule, at_least, broken, number, one_of, truth


@dataclass
class Described:
    x: Any


WHOLE = at_least("x", 1)
RULES = {
    "whole": (WHOLE, [1, 7], [0, -1, 1.0, True, "1", None]),
    "up to 999": (at_least("x", 1, most=999), [1, 999], [1000, 0]),
    "or None": (WHOLE.optional(), [None, 1], [0, "none"]),
    "number": (number("x", lambda value: value > 0, why="w", fix=1.0), [0.1, 3], [0, float("nan"), True, "1"]),
    "word": (one_of("x", ("a", "b")), ["a", "b"], ["c", None, 1]),
    "truth": (truth("x", fix=True), [True, False], [0, 1, "True", None]),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "legal", "illegal"), RULES.values(), ids=RULES)
def test_what_is_legal(rule, legal, illegal):
    assert [value for value in legal if list(broken([rule], Described(value), where="g.py:1"))] == []
    assert [value for value in illegal if not list(broken([rule], Described(value), where="g.py:1"))] == []


def test_a_broken_rule_says_where_what_why_and_what_to_write():
    said = [str(problem) for problem in broken([WHOLE], Described(0), where="g.py:1", says="stage '{x}' has {}")]
    assert said == ["g.py:1: stage '{x}' has x=0; x must be a whole number, 1 or more. Fix: x=1"]
    assert str(next(broken([one_of("x", ("a", "b"))], Described("c"), where="w"))) == (
        "w: x='c'; x is 'a' or 'b'. Fix: x='a'"
    )
    told = Rule("x", lambda value: False, "never", lambda value: f"not {value}")
    assert next(broken([told], Described(5), where="w")).fix == "not 5"


def test_every_broken_rule_is_told():
    rules = [at_least("x", 1), number("x", lambda value: value > 5, why="above 5", fix=6)]
    assert [problem.why for problem in broken(rules, Described(0), where="w")] == [
        "x must be a whole number, 1 or more",
        "above 5",
    ]
