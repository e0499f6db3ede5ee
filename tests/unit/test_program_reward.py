"""The reward of programs: which tests they pass, and what is no program or no test."""

from __future__ import annotations

import json

import pytest

from ops.rewards import PassesTests, SampleError
from ops.rewards.program import program_in
from ops.sandbox import Sandbox, SandboxError, SandboxLimits

TESTS = json.dumps([{"stdin": f"{a} {b}", "stdout": str(a + b)} for a, b in ((1, 2), (3, 4), (10, -10), (0, 0))])
SUM = "a, b = map(int, input().split())\nprint(a + b)  "


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    try:
        Sandbox()
    except SandboxError as error:
        pytest.skip(str(error))


def test_a_program_has_the_fraction_of_the_tests_that_it_passes() -> None:
    half = "a, b = map(int, input().split())\nprint(a + b if a > 0 and b > 0 else 99)"
    opened = PassesTests(limits=SandboxLimits(seconds=2.5)).open()
    fenced = f"Here it is:\n```python\nprint(1)\n```\nNo, this one:\n```\n{SUM}\n```\nDone."
    programs = [SUM, fenced, half, "print(", "while True: pass", "import os; os._exit(1)"]
    assert opened(programs, [TESTS] * 6) == [1.0, 1.0, 0.5, 0.0, 0.0, 0.0]
    found = opened.metrics()
    assert found == pytest.approx({"passes_tests_deadlines": 4 / 24, "passes_tests_failures": 12 / 24})
    assert opened.metrics()["passes_tests_failures"] == 0.0
    opened.close()
    assert PassesTests(all_or_none=True)([SUM, half], [TESTS] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("tests", ["", "{}", "[]", "3", "[{}]", '[{"stdin": "1"}]', "[1]"])
def test_tests_that_are_none_name_their_sample(tests: str) -> None:
    with pytest.raises(SampleError, match="tests are no list") as raised:
        PassesTests()(["", ""], [TESTS, tests])
    assert raised.value.index == 1


def test_a_response_without_a_block_is_the_program() -> None:
    assert program_in("print(1)") == "print(1)"
    assert program_in("```py\nx\n``` and ```\ny\n```") == "y\n"


def test_what_is_wrong_is_found_before_a_run() -> None:
    assert [what for what, _, _ in PassesTests().problems()] == []
    assert [what for what, _, _ in PassesTests(at_once=0).problems()] == ["at_once=0"]
    (problem,) = PassesTests(limits=SandboxLimits(memory_bytes=1 << 20)).problems()
    assert problem[0].startswith("a sandbox does not start")
