"""Tasks with an enumerable set of prompts, exact answers, and held-out prompts that training never sees.

    task = Generated("reverse", digits=4)
    task.train(0)              # ("r7310>", "0137")
    task.held_out_pairs(100)   # 100 pairs that train() never returns

Knows no model and no tokenizer; the first pair loads numpy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from typing import TYPE_CHECKING, Any, Literal

from pipeline.declare.parameters import is_whole
from pipeline.errors import Problem, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from pipeline import Model

LETTERS = {"reverse": "r", "sort": "s", "add": "a", "multiply": "m", "program": "p"}
SIGNS = {"add": "+", "multiply": "*"}  # of tasks with two numbers
MAX_DIGITS = 6
CALL = "="  # ends the call of a calculator
INPUTS = (2, 3, 7)  # of the tests of a program
_SPLIT_STREAM = 2**32 - 1  # of the permutation that selects held-out prompts; epochs count up from 0


@dataclass(frozen=True)
class Generated:
    """All prompts of one task, in an order fixed by `seed`, split into held-out and training prompts.

    task      "reverse" (r1234> gives 4321), "sort" (s4312> gives 1234), "add" (a12+34> gives 046), "multiply"
              (m12*34> gives 0408), or "program": p372> asks for an expression of x in Python with the value of
              3x^2 + 7x + 2, and its answer has tests for `ops.rewards.PassesTests`
    digits    digits per prompt, 1 to 6; with two numbers the total of both, so even. There are 10**digits prompts
    held_out  number of prompts that training never sees
    seed      selects the held-out prompts

    All answers, or expressions, have the same length. Raises ValueError with the allowed range if a parameter is
    outside it.
    """

    task: Literal["reverse", "sort", "add", "multiply", "program"] = "reverse"
    digits: int = 4
    held_out: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in LETTERS:
            raise ValueError(f"task {self.task!r} is not one of {', '.join(LETTERS)}")
        if not (is_whole(self.digits, 1) and self.digits <= MAX_DIGITS):
            raise ValueError(f"digits={self.digits!r} is not a whole number from 1 to {MAX_DIGITS}")
        if self.task in SIGNS and self.digits % 2:
            raise ValueError(
                f"digits={self.digits} is odd; {self.task!r} has two numbers of equal length: 2, 4 or 6 digits"
            )
        if not (is_whole(self.held_out, 0) and self.held_out < self.size):
            raise ValueError(
                f"held_out={self.held_out!r} is not a whole number from 0 to {self.size - 1}: "
                f"{self.digits} digits make {self.size} prompts, and at least one is for training"
            )
        if not (is_whole(self.seed, 0) and self.seed < 2**64):
            raise ValueError(f"seed={self.seed!r} is not a whole number from 0 to 2**64 - 1")

    @property
    def size(self) -> int:
        """Number of prompts, held-out ones included."""
        return 10**self.digits

    @property
    def alphabet(self) -> str:
        """Every character of prompts and answers, or expressions, once each."""
        signs = "x+*()" if self.task == "program" else SIGNS.get(self.task, "")
        return f"0123456789{LETTERS[self.task]}{signs}>"

    @property
    def max_answer(self) -> int:
        """Number of characters in an answer, or in an expression."""
        if self.task == "program":
            return len(polynomial("0" * self.digits))
        return self.digits // 2 + 1 if self.task == "add" else self.digits

    def train(self, index: int, order: int = 0) -> tuple[str, str]:
        """Return pair `index` >= 0 of an endless stream (prompt, answer); each epoch has every training prompt once.

        `order` is the shuffle seed; it does not change the set of prompts.
        """
        from ops.random import shuffled

        if index < 0:
            raise ValueError(f"index {index} is below 0")
        return self._pair(int(self._split()[self.held_out + shuffled(order, index, self.size - self.held_out)]))

    def held_out_pairs(self, count: int) -> list[tuple[str, str]]:
        """Return the first `count` held-out (prompt, answer) pairs. Raises ValueError if `count` exceeds `held_out`."""
        if not 0 <= count <= self.held_out:
            raise ValueError(f"count {count} is not in 0 to {self.held_out}, the number of held-out prompts")
        return [self._pair(int(number)) for number in self._split()[:count]]

    def _split(self) -> np.ndarray:
        return _permutation(self.seed, self.size)

    def _pair(self, number: int) -> tuple[str, str]:
        text = f"{number:0{self.digits}d}"
        letter = LETTERS[self.task]
        if self.task == "reverse":
            return f"{letter}{text}>", text[::-1]
        if self.task == "sort":
            return f"{letter}{text}>", "".join(sorted(text))
        if self.task == "program":
            values = ((x, sum(int(digit) * x**power for power, digit in enumerate(reversed(text)))) for x in INPUTS)
            return f"{letter}{text}>", json.dumps([{"stdin": str(x), "stdout": str(value)} for x, value in values])
        first, second = text[: self.digits // 2], text[self.digits // 2 :]
        made = int(first) + int(second) if self.task == "add" else int(first) * int(second)
        return f"{letter}{first}{SIGNS[self.task]}{second}>", f"{made:0{self.max_answer}d}"


@dataclass(frozen=True)
class Calculated:
    """Turns of a task with two numbers that is solved with a calculator: m12*34> gives the call m12*34=, and after its
    result, in m12*34>m12*34=0408>, the answer 0408.

    source  a task with two numbers
    calls   fraction of the first turns that are calls; the others are the answer, so a model that has learned from
            them calls as seldom. Raises ValueError if it is not within 0 to 1, or if the task has one number
    """

    source: Generated
    calls: float = 1.0

    def __post_init__(self) -> None:
        if self.source.task not in SIGNS:
            raise ValueError(f"the task {self.source.task!r} has nothing to calculate: {' and '.join(SIGNS)} have")
        if not _is_fraction(self.calls):
            raise ValueError(f"calls={self.calls!r} is not a fraction of the first turns, 0 to 1")

    @property
    def alphabet(self) -> str:
        """Every character of prompts, calls and answers, once each."""
        return f"{self.source.alphabet}{CALL}"

    def train(self, index: int, order: int = 0) -> tuple[str, str]:
        """Return what the model sees, and its turn: of each pair of the source first a call or an answer, then the
        answer after a call."""
        pair = index // 2
        prompt, answer = self.source.train(pair, order)
        call = f"{prompt[:-1]}{CALL}"
        if index % 2:
            return f"{prompt}{call}{answer}>", answer
        return prompt, call if _is_due(pair, self.calls) else answer


@dataclass(frozen=True)
class Programmed:
    """Expressions for a task "program": p372> gives (3*x+7)*x+2, or 3*x+7*x+2, which is wrong.

    source  the task, with at least three digits: for two, both are right
    right   fraction of the expressions that have their brackets, so a model that has learned from them writes these as
            seldom. Raises ValueError if it is not within 0 to 1, or if the source is another task
    """

    source: Generated
    right: float = 1.0

    def __post_init__(self) -> None:
        if self.source.task != "program" or self.source.digits < 3:
            raise ValueError(
                f"Generated({self.source.task!r}, digits={self.source.digits}) asks for no expressions with brackets: "
                "Generated('program', digits=3) does"
            )
        if not _is_fraction(self.right):
            raise ValueError(f"right={self.right!r} is not a fraction of the expressions, 0 to 1")

    @property
    def alphabet(self) -> str:
        """Every character of prompts and expressions, once each."""
        return self.source.alphabet

    def train(self, index: int, order: int = 0) -> tuple[str, str]:
        """Return pair `index` >= 0 of an endless stream (prompt, expression), in the order of the source."""
        prompt, _ = self.source.train(index, order)
        made = polynomial(prompt[1:-1])
        return prompt, made if _is_due(index, self.right) else made.replace("(", "").replace(")", "")


def polynomial(digits: str) -> str:
    """An expression of x with these coefficients, the highest power first (Horner's scheme)."""
    made = digits[0]
    for number, digit in enumerate(digits[1:]):
        made = f"({made})*x+{digit}" if number else f"{made}*x+{digit}"
    return made


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _is_due(index: int, share: float) -> bool:
    """Whether number `index` of an endless row belongs to a share of it, spread evenly."""
    return floor((index + 1) * share) > floor(index * share)


@lru_cache(maxsize=4)
def _permutation(seed: int, size: int) -> np.ndarray:
    from ops.random import permutation

    return permutation(seed, _SPLIT_STREAM, size)


def alphabet_problems(source: Any, model: Model, where: str) -> Iterator[Problem]:
    """Check that a model that is built from a config has a token for each character of a Generated task."""
    alphabet = model.alphabet if model.config is not None else None
    if not (isinstance(source, Generated) and isinstance(alphabet, str)) or alphabet in ("", "bytes"):
        return
    if lacks := [character for character in source.alphabet if character not in alphabet]:
        yield Problem(
            where=where,
            what=f"model {model.source!r} has no token for {', '.join(map(repr, lacks))}",
            why=f"prompts and answers of the task {source.task!r} consist of {shown(source.alphabet)}",
            fix=f"Model(..., alphabet={source.alphabet!r})",
        )
