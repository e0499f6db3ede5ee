"""The reward stage: functions are called by field names, failures name the function, no failure becomes a zero."""

import dataclasses
import inspect
import math
import pickle
import threading

import cloudpickle
import pytest
import torch

from ops.rewards import digit_match, exact_match
from pipeline import Graph, Schedule, StageContext, StageError, Task, WorkerGroup
from pipeline.declare.columns import Ragged
from stages.prompts import Prompts
from stages.reward import Reward
from stages.tasks import Generated

torch.set_num_threads(1)
COLUMNS = {"response": ["12", "13", "", "99"], "answer": ["12", "12", "12", "12"]}


def run(stage, columns=COLUMNS, group_size=2):
    context = StageContext(group=WorkerGroup("host"), rank=0, seed=0, group_size=group_size, run_dir=None, shared={})
    return stage.setup(context)(columns, Task(stage="reward", step=0, groups=(7, 9)))


def problems(stage):
    graph = Graph(name="g", source=Prompts(Generated()), stages=(stage,), schedule=Schedule(steps=1))
    return list(stage.check(graph))


def whats(stage):
    return [found.what for found in problems(stage)]


def line_of(function):
    return f"{__file__}:{inspect.getsourcelines(function)[1]}"


def test_exact_match_and_digit_match():
    assert [exact_match(*pair) for pair in (("12", "12"), (" 12\n", "12"), ("1 2", "12"), ("", ""))] == [1, 1, 0, 1]
    cases = {("1234", "1234"): 1, ("1243", "1234"): 0.5, ("123", "1234"): 0.75, ("12345", "1234"): 0.8, ("", "12"): 0}
    for (response, answer), expected in cases.items():
        assert digit_match(response, answer) == expected
    assert digit_match("", "") == 1.0
    assert digit_match("2341", "1234") == 0.0


def test_one_function():
    out = run(Reward(exact_match))
    assert out.columns.keys() == {"reward"}
    assert out.columns["reward"].tolist() == [1, 0, 0, 0]
    assert out.columns["reward"].dtype == torch.float32
    assert out.metrics == {"exact_match": 0.25, "mean": 0.25, "std": pytest.approx(0.5**0.5 / 2)}


def test_replace_makes_a_changed_copy():
    stage = Reward(exact_match, digit_match, weights=(1, 0.5), concurrency=3)
    copy = dataclasses.replace(stage, weights=(2, 2))
    assert (copy.functions, copy.weights, copy.calls) == (stage.functions, (2.0, 2.0), stage.calls)
    assert (copy.reads, copy.writes) == (stage.reads, stage.writes)
    fewer = dataclasses.replace(stage, functions=[exact_match], weights=None)
    assert fewer.functions == (exact_match,)
    assert len(fewer.writes) == 1, "one function has no field of its own"


def test_several_functions_are_weighted_and_kept_apart():
    stage = Reward(exact_match, digit_match, weights=(1, 0.5))
    assert [field.name for field in stage.writes] == ["reward", "reward_exact_match", "reward_digit_match"]
    out = run(stage)
    assert out.columns["reward_digit_match"].tolist() == [1, 0.5, 0, 0]
    assert out.columns["reward"].tolist() == [1.5, 0.25, 0, 0]
    assert out.metrics["digit_match"] == 0.375
    assert out.metrics["mean"] == 0.4375


def test_std_does_not_depend_on_how_a_batch_is_cut():
    whole = run(Reward(digit_match)).metrics["std"]
    halves = [{name: column[i : i + 2] for name, column in COLUMNS.items()} for i in (0, 2)]
    assert whole == pytest.approx(sum(run(Reward(digit_match), half).metrics["std"] for half in halves) / 2)


def test_parameter_names_are_fields_and_values_are_plain():
    seen = []

    def look(response, response_ids, truncated, level, scale=2.0, *, reward_hint=None):
        seen.append((response, response_ids, truncated, level))
        return scale

    stage = Reward(look)
    assert [(field.name, field.dtype, field.dims) for field in stage.reads] == [
        ("response", "str", "N"), ("response_ids", "int64", "N T"), ("truncated", "bool", "N"), ("level", "any", "N"),
    ]  # fmt: skip
    columns = {
        "response": ["ab", "c"],
        "response_ids": Ragged(torch.tensor([5, 6, 7]), (2, 1)),
        "truncated": torch.tensor([False, True]),
        "level": ["1", "2"],
    }
    assert run(stage, columns).columns["reward"].tolist() == [2.0, 2.0]
    assert seen == [("ab", [5, 6], False, "1"), ("c", [7], True, "2")]
    assert type(seen[1][2]) is bool
    assert problems(stage) == []


def test_a_field_that_two_functions_read_is_read_once():
    assert [field.name for field in Reward(exact_match, digit_match).reads] == ["response", "answer"]


def test_description_and_pickling():
    stage = Reward(exact_match, digit_match, weights=[1, 2], name="score")
    assert (stage.name, stage.per, stage.weights) == ("score", "group", (1, 2))
    assert stage.location.file == __file__
    copy = cloudpickle.loads(cloudpickle.dumps(stage))
    assert copy == stage
    assert run(copy).columns["reward"].tolist() == run(stage).columns["reward"].tolist()
    assert Reward(exact_match).name == "reward"
    assert problems(stage) == []


def divides(response, answer):
    return 1 / len(response)


def test_a_function_that_raises_names_itself_the_sample_and_its_inputs():
    with pytest.raises(StageError) as error:
        run(Reward(divides))
    assert str(error.value) == (
        f"{line_of(divides)}: reward divides raised ZeroDivisionError: division by zero for sample 2 of step 1 "
        "(group 9, member 0), called with response='', answer='12'; every sample needs a finite number, and an error "
        "does not count as a reward of 0. Fix: handle this input in the function and return a float"
    )
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"), (math.nan, "nan"), (math.inf, "inf"), ("1", "'1'"), (1e39, "1e+39"), (10**400, "1000"),
        (1j, "1j"), (torch.tensor(1.0), "tensor(1.)"), ((1.0,), "(1.0,)"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_a_finite_number(value, shown):
    def odd(response):
        return value

    with pytest.raises(StageError) as error:
        run(Reward(odd))
    assert f"reward odd returned {shown}" in str(error.value)
    assert error.value.problems[0].where == line_of(odd)


def test_bools_and_numpy_numbers_are_numbers():
    import numpy as np

    for value in (True, 1, np.float64(1), np.float32(1), np.int64(1)):

        def number(response, value=value):
            return value

        assert run(Reward(number)).columns["reward"].tolist() == [1.0] * 4


def test_long_inputs_and_long_messages_are_shortened():
    def shout(response):
        raise ValueError("line\n" * 1000 + response)

    with pytest.raises(StageError) as error:
        run(Reward(shout), {"response": ["x" * 10_000]}, group_size=1)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


def test_a_weighted_sum_beyond_float32_is_refused():
    def big(response):
        return 1e38

    with pytest.raises(StageError, match=r"the weighted sum of 1e\+38 is 1e\+39 for sample 0"):
        run(Reward(big, weights=(10,)))


def test_functions_are_called_in_the_calling_thread():
    names = set()

    def where(response):
        names.add(threading.current_thread())
        return 0

    run(Reward(where))
    assert names == {threading.current_thread()}


def test_problems_of_functions():
    async def later(response):
        yield 1.0

    def everything(*args, **kwargs):
        return 1.0

    def positional(response, /):
        return 1.0

    def nothing(scale=1.0):
        return scale

    def mean(response):
        return 1.0

    def Loud(Response):  # noqa: N802
        return 1.0

    def weights_of(trained_weights):
        return 1.0

    assert whats(Reward()) == ["Reward() has no function"]
    assert whats(Reward(lambda response: 1.0)) == ["a lambda has no name of its own"]
    assert whats(Reward(3)) == ["3 is not a function"]
    assert whats(Reward(later)) == ["reward later is a generator"]
    assert whats(Reward(everything)) == [f"reward everything has the parameter {p}" for p in ("*args", "**kwargs")]
    assert whats(Reward(positional)) == ["reward positional has the parameter response before a /"]
    assert whats(Reward(nothing)) == ["reward nothing reads no field"]
    assert whats(Reward(mean)) == ["reward function is named mean"]
    assert whats(Reward(Loud)) == ["reward function is named Loud", "reward Loud has the parameter Response"]
    assert whats(Reward(weights_of)) == ["reward weights_of has the parameter trained_weights"]
    assert whats(Reward(max)) == ["the signature of max cannot be read"]
    assert problems(Reward(later))[0].where == line_of(later)


def test_a_type_that_a_field_does_not_have_is_refused():
    def wrong(truncated: float, response_ids: str, response: "int", own: int) -> float: ...

    def right(truncated: bool, response_ids: list, response: str, prompt, token_versions: "list[int]") -> float: ...

    fields = ("truncated", "response_ids", "response")
    text = "reward wrong has the parameter {} with another type than its field"
    assert whats(Reward(wrong)) == [text.format(field) for field in fields]
    assert problems(Reward(wrong))[1].fix == "write response_ids: list, or leave the type out"
    assert not whats(Reward(right))


def test_problems_of_the_whole():
    assert whats(Reward(exact_match, exact_match)) == ["2 reward functions are named exact_match"]
    assert whats(Reward(exact_match, digit_match, weights=(1,))) == ["1 weight for 2 functions"]
    assert whats(Reward(exact_match, weights=(math.nan,))) == ["weight nan"]
    stage = Reward(exact_match, weights=(1, 2))
    assert str(problems(stage)[0]) == (
        f"{stage.location}: 2 weights for 1 function; each function has one weight, in the same order. "
        "Fix: write weights=(1.0,)"
    )
