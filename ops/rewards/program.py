"""Programs that a policy writes, run against hidden tests in a sandbox.

    Prompts("train.jsonl", answer="tests")
    Reward(PassesTests(limits=SandboxLimits(seconds=5.0)))     # reads `response` and `answer`
    Evaluate(policy, "test.jsonl", answer="tests", reward=PassesTests())

A test is what the program reads and what it must print. The tests of a row are its answer, a text with JSON in it:

    {"prompt": "Print the sum of two numbers.", "tests": "[{\\"stdin\\": \\"1 2\\", \\"stdout\\": \\"3\\"}]"}
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.rewards.batched import SampleError
from ops.sandbox import Sandbox, SandboxError, SandboxLimits, SandboxRun
from ops.sandbox.containers import Containers, ContainerSandbox
from ops.sandbox.given import Wrong, command_problems

PLACE = "{program}"
_BLOCK = re.compile(r"```[\w+-]*\n(.*?)```", re.DOTALL)
_LINE = re.compile(r"(-?\d{1,9}) ((?:[0-9a-f]{2})*)")  # of a test that was run in a fork
_FORKED = Path(__file__).with_name("forked.py")
_FORKS = ".tests.py"  # its name in the program's folder


@dataclass(frozen=True, kw_only=True)
class PassesTests:
    """The fraction of its tests that a program passes.

    command      how the program is run, beside its `file`
    file         its name in its folder
    around       the text of the file, in which `{program}` stands for the program
    forks        tests run in one sandbox, one after the other, in forks of one Python: a program with three tests takes
                 a third of the time. `limits` are then those of all tests of a program together, and one that does not
                 end fails those after it too. For programs in Python, whose `command` ends with the file
    limits       of each run
    containers   where programs run, instead of a sandbox of Linux namespaces: `Containers(image="python:3.12-slim")`
    all_or_none  1.0 if it passes all tests, else 0.0
    at_once      programs that run at the same time

    The program is the last fenced block of the response, or all of it. A test passes if the program ends with exit code
    0 and prints what is expected, spaces at the ends of lines and of the text aside. A program that several samples of
    a call have, with the same tests, runs once. Tests that are none are an error that names its sample. Metrics, as
    fractions of tests that were run: `passes_tests_deadlines`, `passes_tests_failures`.
    """

    command: Sequence[str] = ("python3", "main.py")
    file: str = "main.py"
    around: str = PLACE
    forks: bool = False
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    containers: Containers | None = None
    all_or_none: bool = False
    at_once: int = 2

    __name__ = "passes_tests"
    batched = True

    def __call__(self, response: list[str], answer: list[str]) -> list[float]:
        """Run the programs in a sandbox that lives only for this call, to try it out. A stage uses `open`."""
        opened = self.open()
        try:
            return opened(response, answer)
        finally:
            opened.close()

    def open(self) -> _Opened:
        """Make the sandbox. Raises SandboxError where the machine allows none."""
        return _Opened(self)

    def problems(self) -> Iterator[Wrong]:
        """Why it cannot run here, as (what, why, fix)."""
        found = [*self._wrong()]
        yield from found
        if found:
            return
        try:
            self.sandbox()
        except (SandboxError, OSError, TypeError, ValueError) as error:
            why = "programs that a policy writes run in a sandbox only"
            fix = "a machine, or a container, that allows namespaces"
            if self.containers:
                client = shlex.join(self.containers.client)
                fix = f"a machine that has this image, and leave to run it with {client}"
            yield str(error), why, fix

    def sandbox(self) -> Sandbox | ContainerSandbox:
        """Make what runs its programs. Raises SandboxError where the machine allows none."""
        return self.containers.sandbox(self.limits) if self.containers else Sandbox(self.limits)

    def _wrong(self) -> Iterator[Wrong]:
        if not (isinstance(self.at_once, int) and self.at_once >= 1):
            yield (
                f"PassesTests has at_once={self.at_once!r}",
                "it must be a whole number of programs, 1 or more",
                "at_once=2",
            )
        if not (isinstance(self.around, str) and PLACE in self.around):
            what, why = f"PassesTests has around={self.around!r:.60}", f"{PLACE} in it stands for the program"
            yield what, why, f'around="import math\\n{PLACE}"'
        if isinstance(self.limits, SandboxLimits):
            yield from self.limits.problems()
        else:
            what, why = f"PassesTests has limits={self.limits!r:.60}", "they are SandboxLimits"
            yield what, why, "limits=SandboxLimits(seconds=5.0)"
        if isinstance(self.containers, Containers):
            yield from self.containers.problems()
        elif self.containers is not None:
            what, why = f"PassesTests has containers={self.containers!r:.60}", "they are Containers, or None"
            yield what, why, 'containers=Containers(image="python:3.12-slim")'
        found = [*command_problems("PassesTests", self.command)]
        yield from found
        if self.forks and not found and [*self.command][-1:] != [self.file]:
            what, why = (
                f"PassesTests has forks=True and command={self.command!r:.60}",
                "tests are forks of a Python with the program",
            )
            yield what, why, f'command=("python3", "{self.file}")'


Case = tuple[str, str]  # what a program reads, and what it must print


class _Opened:
    def __init__(self, reward: PassesTests) -> None:
        self._reward, self._sandbox = reward, reward.sandbox()
        self._threads = ThreadPoolExecutor(reward.at_once)
        self._tests = self._deadlines = self._failures = 0

    def __call__(self, response: list[str], answer: list[str]) -> list[float]:
        cases = [tuple(cases_of(text, i)) for i, text in enumerate(answer)]
        asked = [(program_in(text), of_it) for text, of_it in zip(response, cases, strict=True)]
        once = [*dict.fromkeys(asked)]
        made = dict(zip(once, self._threads.map(self._passed, once)))
        return [made[each] for each in asked]

    def metrics(self) -> dict[str, float]:
        """The fractions of the tests since the last call."""
        tests = max(1, self._tests)
        found = {"deadlines": self._deadlines / tests, "failures": self._failures / tests}
        self._tests = self._deadlines = self._failures = 0
        return found

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _passed(self, asked: tuple[str, tuple[Case, ...]]) -> float:
        program, cases = self._reward.around.replace(PLACE, asked[0]), asked[1]
        made = self._forked(program, cases) if self._reward.forks else self._apart(program, cases)
        self._tests += len(cases)
        self._deadlines += sum(ran.why == "deadline" for ran in made)
        self._failures += sum(not ran.ok for ran in made)
        passed = sum(ran.ok and _lines(ran.output) == _lines(stdout) for ran, (_, stdout) in zip(made, cases))
        return float(passed == len(cases)) if self._reward.all_or_none else passed / len(cases)

    def _apart(self, program: str, cases: Sequence[Case]) -> list[SandboxRun]:
        """Run each test in a sandbox of its own."""
        files = {self._reward.file: program}
        return [self._sandbox.run(self._reward.command, files=files, stdin=stdin) for stdin, _ in cases]

    def _forked(self, program: str, cases: Sequence[Case]) -> list[SandboxRun]:
        """Run all tests in one sandbox. A test without a result has ended as the sandbox did."""
        inputs = [stdin for stdin, _ in cases]
        script = f"{_FORKED.read_text(encoding='utf-8')}\n\nrun({self._reward.file!r}, {inputs!r})\n"
        command = [*self._reward.command[:-1], _FORKS]
        ran = self._sandbox.run(command, files={self._reward.file: program, _FORKS: script})
        made = [SandboxRun(code=int(code), output=bytes.fromhex(text).decode(errors="replace"), error="")
                for code, text in results_in(ran.output)[: len(cases)]]  # fmt: skip
        return made + [SandboxRun(code=ran.code or 1, output="", error="", why=ran.why)] * (len(cases) - len(made))


def results_in(output: str) -> list[tuple[str, str]]:
    """The exit codes and outputs, in hexadecimal, of tests that were run in forks; none after a line that is no such
    result."""
    found: list[tuple[str, str]] = []
    for line in output.splitlines(keepends=True):
        result = _LINE.fullmatch(line.removesuffix("\n")) if line.endswith("\n") else None
        if result is None:
            break
        found.append((result[1], result[2]))
    return found


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
