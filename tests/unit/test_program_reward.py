"""The reward of programs: which tests they pass, and what is no program or no test."""

from __future__ import annotations

import json

import pytest

from ops.rewards import PassesTests, SampleError
from ops.rewards.program import program_in, results_in
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
    assert found == pytest.approx({"deadlines": 4 / 24, "failures": 12 / 24})
    assert opened.metrics()["failures"] == 0.0
    opened.close()
    assert PassesTests(all_or_none=True)([SUM, half], [TESTS] * 2) == [1.0, 0.0]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sandboxes were given, as text."""
    made: list[str] = []
    run = Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda *given, **more: made.append(f"{given}{more}") or run(*given, **more))
    return made


@pytest.mark.parametrize("forks", [False, True])
def test_expected_outputs_do_not_enter_the_sandbox(runs: list[str], forks: bool) -> None:
    tests = json.dumps([{"stdin": "given", "stdout": "wanted 7"}])
    assert PassesTests(forks=forks)(["print(input()[:0] + 'wanted', 7)"], [tests]) == [1.0]
    assert "given" in runs[-1] and not any("wanted 7" in run for run in runs)


def test_forks_have_the_same_results_in_one_sandbox(runs: list[str]) -> None:
    opened = PassesTests(limits=SandboxLimits(seconds=2.5), forks=True).open()
    some = "a, b = map(int, input().split())\nif a == 3: {}\nprint(a + b)"
    programs = [
        SUM,
        "state = []\n" + SUM.replace("print", "state.append(1); assert len(state) == 1; print"),
        *(some.format(does) for does in ("1 / 0", "raise SystemExit(0)", "import os; os.abort()")),
        some.format("any(iter(int, 1))"),
        "print(",
        "import sys; sys.exit(sum(map(int, sys.stdin.read().split())))",
        "open('/proc/self/fd/1', 'w').write(input() and 'é\\n')",
        SUM,
    ]
    runs.clear()
    assert opened(programs, [TESTS] * 10) == [1.0, 1.0, 0.75, 0.75, 0.75, 0.25, 0.0, 0.0, 0.0, 1.0]
    assert len(runs) == 9, "one for all tests of a program, and one for programs that are the same"
    assert opened.metrics() == pytest.approx({"deadlines": 3 / 36, "failures": 11 / 36})
    opened.close()


def test_what_is_no_result_of_a_test_ends_the_results() -> None:
    """A program that could write among them would gain nothing: it knows no expected output."""
    assert results_in("0 330a\n-6 \n0 33\n") == [("0", "330a"), ("-6", ""), ("0", "33")]
    for broken in ("0 3\n", "0 zz\n", "0 33", "99999999999 33\n", "x\n", "\n", "0 33 \n"):
        assert results_in(f"1 33\n{broken}0 33\n") == [("1", "33")]


def test_a_program_stands_in_the_text_around_it() -> None:
    around = "a, b = map(int, input().split())\nprint({program}, end='{}')"
    assert PassesTests(around=around)(["a + b", "a - b"], [TESTS] * 2) == [0.0, 0.0]
    assert PassesTests(around=around.replace("{}", ""), forks=True)(["a + b", "b"], [TESTS] * 2) == [1.0, 0.25]


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
    (problem,) = PassesTests(limits=SandboxLimits(memory_bytes=1 << 20)).problems()
    assert problem[0].startswith("a sandbox does not start")
