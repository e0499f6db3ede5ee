"""Enumerable tasks: correct answers, held-out prompts that training never gets, an order fixed by the seeds."""

import json
import pickle

import pytest

from stages.tasks import Calculated, Generated, Programmed

SMALL = {"digits": 2, "held_out": 30}


def solve(prompt):
    letter, body = prompt[0], prompt[1:-1]
    if letter == "r":
        return "".join(reversed(body))
    if letter == "s":
        return "".join(sorted(body))
    first, second = body.split("+")
    return str(int(first) + int(second)).rjust(len(first) + 1, "0")


@pytest.mark.parametrize("task", ["reverse", "sort", "add"])
def test_every_answer_is_right_and_every_prompt_is_there_once(task):
    source = Generated(task, **SMALL)
    held = source.held_out_pairs(30)
    epoch = [source.train(i) for i in range(70)]
    assert len({prompt for prompt, _ in held + epoch}) == source.size == 100
    for prompt, answer in held + epoch:
        assert answer == solve(prompt)
        assert set(prompt + answer) <= set(source.alphabet)
        assert len(answer) == source.max_answer
        assert prompt.endswith(">")
    assert len(set(source.alphabet)) == len(source.alphabet)


def test_the_formats_are_these():
    texts = {
        task: dict(Generated(task, held_out=0).train(i) for i in range(10**4)) for task in ("reverse", "sort", "add")
    }
    assert texts["reverse"]["r1230>"] == "0321"
    assert texts["sort"]["s4031>"] == "0134"
    assert texts["add"]["a12+34>"] == "046"
    assert texts["add"]["a99+01>"] == "100"


def test_training_never_sees_what_is_held_out():
    source = Generated("reverse", **SMALL)
    held = {prompt for prompt, _ in source.held_out_pairs(30)}
    seen = {source.train(i, order)[0] for i in range(210) for order in range(3)}
    assert not held & seen
    assert len(seen) == 70


def test_epochs_have_each_prompt_once_in_another_order():
    source = Generated("sort", **SMALL)
    epochs = [[source.train(70 * e + i) for i in range(70)] for e in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_pair_is_a_pure_function_of_its_index():
    forward = [Generated(**SMALL).train(i) for i in range(100)]
    source = pickle.loads(pickle.dumps(Generated(**SMALL)))
    assert [source.train(i) for i in reversed(range(100))] == forward[::-1]


def test_order_shuffles_and_seed_splits():
    source = Generated(**SMALL)
    assert [source.train(i, 0) for i in range(70)] != [source.train(i, 1) for i in range(70)]
    assert sorted(source.train(i, 0) for i in range(70)) == sorted(source.train(i, 1) for i in range(70))
    assert source.held_out_pairs(30) != Generated(**SMALL, seed=1).held_out_pairs(30)
    assert source.held_out_pairs(10) == source.held_out_pairs(30)[:10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "copy"}, "task 'copy' is not one of reverse, sort, add"),
        ({"digits": 0}, "digits=0 is not a whole number from 1 to 6"),
        ({"digits": 7}, "digits=7 is not a whole number from 1 to 6"),
        ({"digits": True}, "digits=True"),
        ({"task": "add", "digits": 3}, "digits=3 is odd"),
        ({"digits": 2}, "held_out=1000 is not a whole number from 0 to 99"),
        ({"held_out": -1}, "held_out=-1 is not a whole number from 0 to 9999"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_parameters_are_named_with_their_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Generated(**arguments)


def test_bad_requests_are_named():
    source = Generated(**SMALL)
    with pytest.raises(ValueError, match="index -1"):
        source.train(-1)
    with pytest.raises(ValueError, match="count 31 is not in 0 to 30"):
        source.held_out_pairs(31)


def test_tests_of_a_program_are_met_by_its_expression_and_not_without_brackets():
    source = Generated("program", digits=4, held_out=10)
    failed = 0
    for i in range(50):
        (prompt, answer), (again, expression) = source.train(i, 3), Programmed(source).train(i, 3)
        _, bare = Programmed(source, right=0.0).train(i, 3)
        assert prompt == again and prompt[0] + prompt[-1] == "p>" and prompt[1:-1].isdigit()
        assert set(prompt + expression) <= set(source.alphabet) and len(expression) == source.max_answer
        assert bare == expression.replace("(", "").replace(")", "")
        a, b, c, d = map(int, prompt[1:-1])
        cases = [(int(case["stdin"]), int(case["stdout"])) for case in json.loads(answer)]
        assert all(a * x**3 + b * x**2 + c * x + d == value == eval(expression, {"x": x}) for x, value in cases)
        failed += any(eval(bare, {"x": x}) != value for x, value in cases)
    assert len(cases) == 3 and failed > 45


def test_turns_with_a_calculator_show_calls_as_often_as_asked():
    source = Generated("multiply")
    shown = [Calculated(source, calls=0.25).train(i) for i in range(40)]
    for pair, (first, second) in enumerate(zip(shown[::2], shown[1::2])):
        prompt, answer = source.train(pair)
        call = f"{prompt[:-1]}="
        assert first == (prompt, call if pair % 4 == 3 else answer)
        assert second == (f"{prompt}{call}{answer}>", answer)
    assert all(Calculated(source).train(2 * i)[1].endswith("=") for i in range(9))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Calculated(Generated("sort")), "the task 'sort' has nothing to calculate: add and multiply have"),
        (lambda: Calculated(Generated("add"), calls=1.5), "calls=1.5 is not a fraction of the first turns, 0 to 1"),
        (lambda: Programmed(Generated("sort")), "asks for no expressions with brackets"),
        (lambda: Programmed(Generated("program", digits=2, held_out=9)), r"digits=2\) asks for no expressions"),
        (lambda: Programmed(Generated("program", digits=4), right="all"), "right='all' is not a fraction"),
    ],
)
def test_what_cannot_be_shown_is_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()
