"""Programs that a policy writes, run against hidden tests in a sandbox.

    Prompts("train.jsonl", extra=("tests",))
    Reward(PassesTests(limits=SandboxLimits(seconds=5.0)))     # reads `response` and `tests`

A test is what the program reads and what it must print. Tests are a column of the data, a text with JSON in it:

    {"prompt": "Print the sum of two numbers.", "tests": "[{\\"stdin\\": \\"1 2\\", \\"stdout\\": \\"3\\"}]"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ops.rewards.batched import SampleError
from ops.sandbox import Sandbox, SandboxError, SandboxLimits

_BLOCK = re.compile(r"```[\w+-]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class PassesTests:
    """The fraction of its tests that a program passes.

    command      how the program is run, beside its `file`
    file         its name in its folder
    limits       of each run
    all_or_none  1.0 if it passes all tests, else 0.0
    at_once      programs that run at the same time

    The program is the last fenced block of the response, or all of it. A test passes if the program ends with exit code
    0 and prints what is expected, spaces at the ends of lines and of the text aside. Tests that are none are an error
    that names its sample. Metrics, as fractions of runs: `passes_tests_deadlines`, `passes_tests_failures`.
    """

    command: Sequence[str] = ("python3", "main.py")
    file: str = "main.py"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    all_or_none: bool = False
    at_once: int = 2

    __name__ = "passes_tests"
    batched = True

    def __call__(self, response: list[str], tests: list[str]) -> list[float]:
        """Run the programs in a sandbox that lives only for this call, to try it out. A stage uses `open`."""
        opened = self.open()
        try:
            return opened(response, tests)
        finally:
            opened.close()

    def open(self) -> _Opened:
        """Make the sandbox. Raises SandboxError where the machine allows none."""
        return _Opened(self)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Why it cannot run here, as (what, why, fix)."""
        if not (isinstance(self.at_once, int) and self.at_once >= 1):
            yield f"at_once={self.at_once!r}", "it must be a whole number of programs, 1 or more", "at_once=2"
        try:
            Sandbox(self.limits)
        except (SandboxError, OSError, TypeError, ValueError) as error:
            why = "programs that a policy writes run in a sandbox only"
            yield str(error), why, "a machine, or a container, that allows namespaces"


class _Opened:
    def __init__(self, reward: PassesTests) -> None:
        self._reward, self._sandbox = reward, Sandbox(reward.limits)
        self._threads = ThreadPoolExecutor(reward.at_once)
        self._runs = self._deadlines = self._failures = 0

    def __call__(self, response: list[str], tests: list[str]) -> list[float]:
        cases = [cases_of(text, i) for i, text in enumerate(tests)]
        return [*self._threads.map(self._passed, response, cases)]

    def metrics(self) -> dict[str, float]:
        """The fractions of the runs since the last call."""
        runs = max(1, self._runs)
        found = {"passes_tests_deadlines": self._deadlines / runs, "passes_tests_failures": self._failures / runs}
        self._runs = self._deadlines = self._failures = 0
        return found

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _passed(self, response: str, cases: Sequence[tuple[str, str]]) -> float:
        passed = sum(self._passes(program_in(response), *case) for case in cases)
        return float(passed == len(cases)) if self._reward.all_or_none else passed / len(cases)

    def _passes(self, program: str, stdin: str, stdout: str) -> bool:
        ran = self._sandbox.run(self._reward.command, files={self._reward.file: program}, stdin=stdin)
        self._runs += 1
        self._deadlines += ran.why == "deadline"
        self._failures += not ran.ok
        return ran.ok and _lines(ran.output) == _lines(stdout)


def program_in(response: str) -> str:
    """The last fenced block of a response; all of it if it has none."""
    blocks: list[str] = _BLOCK.findall(response)
    return blocks[-1] if blocks else response


def cases_of(text: str, sample: int) -> list[tuple[str, str]]:
    """What tests give a program and expect of it. Raises SampleError for tests that are none."""
    try:
        made: Any = json.loads(text)
        return [(str(case["stdin"]), str(case["stdout"])) for case in made] or _no_tests(sample)
    except (ValueError, TypeError, KeyError):
        return _no_tests(sample)


def _no_tests(sample: int) -> Any:
    raise SampleError(sample, 'tests are no list of {"stdin": ..., "stdout": ...} in JSON')


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
