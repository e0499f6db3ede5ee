"""Tasks with an enumerable set of prompts, exact answers, and held-out prompts that training never sees.

    task = Generated("reverse", digits=4)
    task.train(0)              # ("r7310>", "0137")
    task.held_out_pairs(100)   # 100 pairs that train() never returns

Knows no model and no tokenizer; the first pair loads numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pipeline.declare.parameters import is_whole
from pipeline.errors import Problem, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from pipeline import Model

LETTERS = {"reverse": "r", "sort": "s", "add": "a", "multiply": "m"}
SIGNS = {"add": "+", "multiply": "*"}  # of tasks with two numbers
MAX_DIGITS = 6
CALL = "="  # ends the call of a calculator
_SPLIT_STREAM = 2**32 - 1  # of the permutation that selects held-out prompts; epochs count up from 0


@dataclass(frozen=True)
class Generated:
    """All prompts of one task, in an order fixed by `seed`, split into held-out and training prompts.

    task      "reverse" (r1234> gives 4321), "sort" (s4312> gives 1234), "add" (a12+34> gives 046) or "multiply"
              (m12*34> gives 0408)
    digits    digits per prompt, 1 to 6; with two numbers the total of both, so even. There are 10**digits prompts
    held_out  number of prompts that training never sees
    seed      selects the held-out prompts

    All answers have the same length. Raises ValueError with the allowed range if a parameter is outside it.
    """

    task: Literal["reverse", "sort", "add", "multiply"] = "reverse"
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
        """Every character of prompts and answers, once each."""
        return "0123456789" + LETTERS[self.task] + SIGNS.get(self.task, "") + ">"

    @property
    def max_answer(self) -> int:
        """Number of characters in an answer."""
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
        first, second = text[: self.digits // 2], text[self.digits // 2 :]
        made = int(first) + int(second) if self.task == "add" else int(first) * int(second)
        return f"{letter}{first}{SIGNS[self.task]}{second}>", f"{made:0{self.max_answer}d}"


@dataclass(frozen=True)
class Calculated:
    """Turns of a task with two numbers that is solved with a calculator: m12*34> gives the call 12*34=, and after its
    result, in m12*34>12*34=0408>, the answer 0408."""

    source: Generated

    @property
    def alphabet(self) -> str:
        """Every character of prompts, calls and answers, once each."""
        return f"{self.source.alphabet}{CALL}"

    def train(self, index: int, order: int = 0) -> tuple[str, str]:
        """Return what the model sees, and its turn: of each pair of the source first the call, then the answer."""
        prompt, answer = self.source.train(index // 2, order)
        call = f"{prompt[1:-1]}{CALL}"
        return (f"{prompt}{call}{answer}>", answer) if index % 2 else (prompt, call)


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
