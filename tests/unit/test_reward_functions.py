"""The shipped rewards, on texts and lengths. Those of math-verify have their own file."""

import dataclasses
from decimal import Decimal

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ops.rewards
from ops.rewards import (
    Overlong,
    boxed,
    final_number,
    gsm8k_match,
    last_boxed,
    model_reward,
    number_match,
    overlong_penalty,
    regex_match,
    tagged,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is $1,250.50.", "1250.50"), ("7-3", "3"), ("7 - 3", "3"), ("is -3", "-3"), ("(-3)", "-3"),
        ("-$5", "-5"), ("$-5", "-5"), ("\u22125", "-5"), ("1,2,3", "3"), ("12,3456", "3456"), ("1,234,567", "1234567"),
        (".5", "0.5"), ("18.", "18"), ("18.00 dollars", "18"), ("x2", "2"), ("3 of 4%", "4"), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_the_final_number(text, number):
    assert final_number(text) == Decimal(number)


def test_a_text_without_a_number():
    assert final_number("") is None
    assert final_number("twelve - . , $") is None


@given(st.integers(-(10**12), 10**12), st.sampled_from(["", "$"]))
def test_a_number_with_commas_is_read_back(value, dollar):
    sign = "-" if value < 0 else ""
    assert final_number(f"so {sign}{dollar}{abs(value):,} it is") == value


def test_numbers_match_by_value():
    assert number_match("The answer is 18.00", "18") == 1.0
    assert number_match("It is 18, not 19", "18") == 0.0
    assert number_match("none", "18") == 0.0
    with pytest.raises(ValueError, match="the answer has no number"):
        number_match("18", "eighteen")


def test_gsm8k_answers():
    answer = "She has 16 - 7 = <<16-7=9>>9 eggs.\n#### 1,009"
    assert gsm8k_match("... so 1009", answer) == 1.0
    assert gsm8k_match("#### 1009\nThat was 3 steps.", answer) == 0.0
    assert gsm8k_match("5 steps\n#### 1009 eggs", answer) == 1.0
    assert gsm8k_match("9", answer) == 0.0
    with pytest.raises(ValueError, match="the answer has no ####"):
        gsm8k_match("9", "9")


def test_a_pattern_is_found_or_its_group_is_the_answer():
    found = regex_match(r"(?i)therefore")
    assert (found("Therefore 2"), found("so 2")) == (1.0, 0.0)
    answered = regex_match(r"answer is\s*(\S+)", group=1, name="said")
    assert answered("the answer is 3, no, the answer is 2", " 2 ") == 1.0
    assert answered("the answer is 2, no, the answer is 3", "2") == 0.0
    assert answered("2", "2") == 0.0
    assert regex_match(r"(?P<n>\d+)", group="n")("1 2", "2") == 1.0
    assert regex_match(r"a(b)?", group=1)("a", "") == 1.0
    assert (found.__name__, answered.__name__) == ("regex_match", "said")


def test_tags_in_their_order():
    layout = tagged("think", "answer")
    assert layout("<think>a\nb</think>\n<answer>2</answer>\n") == 1.0
    for wrong in (
        "<answer>2</answer><think>a</think>",
        "<think>a</think> so <answer>2</answer>",
        "<think>a</think><answer>2</answer> done",
        "<think>a</think><answer>2</answer><answer>3</answer>",
        "<think>a<answer>2</answer></think>",
        "<think>a</think><answer>2",
        "",
    ):
        assert layout(wrong) == 0.0, wrong
    assert tagged("a", name="layout").__name__ == "layout"


def test_boxes():
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}} and \boxed{open") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed 2") is None
    assert [boxed(text) for text in (r"so \boxed{2}", r"\boxed{ }", r"\boxed{2", "2")] == [1.0, 0.0, 0.0, 0.0]


def test_the_punishment_of_long_responses():
    lengths = (0, 8, 9, 10, 12, 13, 10**9)
    assert [overlong_penalty(n, max_tokens=12, cache=4) for n in lengths] == [0, 0, -0.25, -0.5, -1, -1, -1]
    assert overlong_penalty(6, max_tokens=6, cache=6) == -1.0
    for cache in (0, -1, 13):
        with pytest.raises(ValueError, match=f"cache is {cache}, not between 1 and max_tokens, 12"):
            overlong_penalty(1, max_tokens=12, cache=cache)
    assert Overlong(max_tokens=12, cache=4)(token_versions=[-1, *[7] * 10, -1]) == -0.5


def test_the_score_of_a_model_is_passed_on():
    assert model_reward(model_reward=-3.25) == -3.25


INSTANCES = [
    Overlong(max_tokens=12, cache=4), regex_match("a"), regex_match("(a)", 1), tagged("a"), ops.rewards.MathVerify(),
]  # fmt: skip


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: instance.__name__)
def test_what_has_parameters_is_frozen_and_travels(instance):
    assert cloudpickle.loads(cloudpickle.dumps(instance)) == instance
    assert instance.__name__.islower()
    assert list(instance.problems()) == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        instance.name = "other"


@pytest.mark.parametrize(
    ("instance", "what"),
    [
        (Overlong(max_tokens=4, cache=5), "Overlong has max_tokens=4 and cache=5"),
        (Overlong(max_tokens=4, cache=0), "Overlong has max_tokens=4 and cache=0"),
        (Overlong(max_tokens=4.0, cache=1), "Overlong has max_tokens=4.0 and cache=1"),
        (regex_match("("), "regex_match cannot read the pattern '(': missing ), unterminated subpattern at position 0"),
        (regex_match("(", 1), "regex_match cannot read the pattern '('"),
        (regex_match("(a)", 2), "regex_match has group=2, and the pattern '(a)' has the group 1"),
        (regex_match("(a)", "n"), "regex_match has group='n'"),
        (tagged(), "tagged() names no tag"),
        (tagged("<a>"), "tagged has the tag '<a>'"),
        (tagged("a", "a"), "tagged names the tag 'a' twice"),
    ],
)
def test_what_is_wrong_with_a_description(instance, what):
    ((found, _, _),) = instance.problems()
    assert found.startswith(what)
