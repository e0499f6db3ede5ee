r"""Mathematical equality of answers, by math-verify (LaTeX, fractions, sets, intervals, equations ...).

    Reward(math_verify)
    Reward(MathVerify(timeout_s=3.0, on_timeout=0.0, on_error=0.0, processes=4))

The library computes with sympy. A response such as `\boxed{9^{9^9}}` would keep it busy forever, and it works only in
main threads. It therefore runs in separate processes, which start when the stage is set up; a process that exceeds its
deadline is killed and replaced.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.rewards.batched import SampleError
from ops.rewards.workers import Lost, Workers

_SCRIPT = Path(__file__).with_name("symbolic_worker.py")


@dataclass(frozen=True, kw_only=True)
class MathVerify:
    r"""1.0 if the last expression of the response equals the answer, else 0.0.

    timeout_s     time limit per sample, in seconds
    on_timeout    the reward of a response that exceeds it, or 4 GiB of memory; None makes it an error
    on_error      the reward of a response that makes the library raise, or its process die; None makes it an error
    processes     number of processes that compare in parallel; each uses one core while it works
    answer_after  use only the part of the answer after the last such mark; GSM8K's is "####". Empty uses all of it

    A response without mathematics is wrong: 0.0. An answer without mathematics, or without the mark, is an error that
    names its sample. An answer that is neither a plain number nor marked as mathematics ($, \(, \[, \boxed) is parsed
    as LaTeX.

    Metrics, as fractions of samples: `math_verify_timeouts`, `math_verify_errors`.
    """

    timeout_s: float = 5.0
    on_timeout: float | None = 0.0
    on_error: float | None = None
    processes: int = 2
    answer_after: str = ""

    __name__ = "math_verify"
    batched = True

    def __call__(self, response: list[str], answer: list[str]) -> list[float]:
        """Compare with processes that live only for this call, to try it out. A stage uses `open`."""
        opened = self.open()
        try:
            return opened(response, answer)
        finally:
            opened.close()

    def open(self) -> OpenMathVerify:
        """Start the processes without waiting for them, so that they load during the rest of the setup."""
        return OpenMathVerify(self)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield the problems of the description and the installation, as (what, why, fix)."""
        if importlib.util.find_spec("math_verify") is None:
            yield "math_verify needs the package 'math-verify'", "it is not installed", "pip install 'sluice-rl[math]'"
        if not (_is_number(self.timeout_s) and self.timeout_s > 0):
            yield (
                f"MathVerify has timeout_s={self.timeout_s!r}",
                "it must be a number of seconds above 0",
                "timeout_s=5.0",
            )
        for name in ("on_timeout", "on_error"):
            value = getattr(self, name)
            if not (value is None or _is_number(value)):
                yield f"MathVerify has {name}={value!r}", "it is a reward, or None for an error", f"{name}=0.0"
        if not isinstance(self.processes, int) or isinstance(self.processes, bool) or self.processes < 1:
            yield f"MathVerify has processes={self.processes!r}", "it must be 1 or more", "processes=2"
        if not isinstance(self.answer_after, str):
            yield f"MathVerify has answer_after={self.answer_after!r}", "it must be a string", 'answer_after="####"'


class OpenMathVerify:
    """The running processes of a `MathVerify`, and the metrics of its last call."""

    def __init__(self, description: MathVerify) -> None:
        self._description = description
        self._workers = Workers([sys.executable, "-P", str(_SCRIPT)], description.processes)
        self._counts = {"timeouts": 0.0, "errors": 0.0}

    def __call__(self, response: Sequence[str], answer: Sequence[str]) -> list[float]:
        """Return one reward per sample. Raises SampleError for the first sample that is an error."""
        pairs = [(text, self._expected(i, answer[i])) for i, text in enumerate(response)]
        distinct = list(dict.fromkeys(pairs))
        limit_s = self._description.timeout_s
        replies = self._workers.ask([[*pair, limit_s] for pair in distinct], limit_s)
        reply_to = dict(zip(distinct, replies))
        late = [_is_late(reply_to[pair]) for pair in pairs]
        broken = [_error(reply_to[pair]) is not None for pair in pairs]
        size = max(1, len(pairs))
        self._counts = {"timeouts": sum(late) / size, "errors": sum(broken) / size}
        return [self._score(i, reply_to[pair]) for i, pair in enumerate(pairs)]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last call, as fractions of its samples."""
        return self._counts

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._workers.close()

    def _expected(self, index: int, answer: str) -> str:
        mark = self._description.answer_after
        if not mark:
            return answer
        _, found, expected = answer.rpartition(mark)
        if not found:
            raise SampleError(index, f"the answer has no {mark!r}, the mark of MathVerify(answer_after=)")
        return expected

    def _score(self, index: int, reply: Any) -> float:
        if _is_late(reply):
            if self._description.on_timeout is None:
                what = f"no verdict in {self._description.timeout_s:g} s and 4 GiB (on_timeout=0.0 counts it as wrong)"
                raise SampleError(index, what)
            return float(self._description.on_timeout)
        if (error := _error(reply)) is not None:
            if self._description.on_error is None:
                raise SampleError(index, f"math-verify failed (on_error=0.0 counts it as wrong): {error}")
            return float(self._description.on_error)
        if reply[0] == "answer":
            raise SampleError(index, f"the answer cannot be read: {reply[1]}; correct this row, or filter it out")
        return float(reply[0] == "right")


def _is_late(reply: Any) -> bool:
    return reply.late if isinstance(reply, Lost) else reply[0] == "memory"


def _error(reply: Any) -> str | None:
    if isinstance(reply, Lost):
        return None if reply.late else reply.text
    return reply[1] if reply[0] == "error" else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


math_verify = MathVerify()
