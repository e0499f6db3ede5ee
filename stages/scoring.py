"""Calls reward functions on samples. Knows how they are called and how they fail, not what the numbers mean.

A function is called once per sample, in this thread. An `async` function is awaited, several calls at a time, each with
a time limit. A function marked with `ops.rewards.batched` is called once, with lists. If a function has a method
`open`, that is called first, and its result is called instead of the function: it can hold processes and connections,
and if it has a method `metrics`, these are reported.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import reprlib
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from pipeline import StageError
from pipeline.declare.calls import is_async
from pipeline.errors import CALLED, Problem, is_users, message_of

RewardFunction = Callable[..., Any]
LARGEST = (2 - 2**-23) * 2.0**127  # float32

_RETRY_WAIT_S = 0.2  # before the second attempt; doubled before each further one
_CLEANUP_S = 1.0  # for cancelled calls to end


@dataclass(frozen=True)
class AsyncCalls:
    """Limits of `async` functions: concurrent calls, seconds per attempt, and attempts after the first one."""

    concurrency: int = 16
    timeout_s: float = 60.0
    retries: int = 0


class Scorer:
    """Opened reward functions. `scores` may be called repeatedly, from one thread at a time.

    `where` is the line that uses the functions; errors of shipped functions point there.
    """

    def __init__(self, functions: Sequence[RewardFunction], calls: AsyncCalls, where: str = "") -> None:
        self._functions, self._calls, self._where = functions, calls, where
        self._targets = [opened(function) for function in functions]
        self._names = [fields_of(function) for function in functions]
        self._retried: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def scores(self, plain: Mapping[str, Sequence[Any]], size: int, sample: Callable[[int], str]) -> list[list[float]]:
        """Return one number per sample for each function. `plain` has each field's values; `sample(i)` names a sample.

        Raises StageError if a function raises, times out, or returns anything but finite numbers.
        """
        made: dict[int, list[float]] = {}
        waiting: dict[int, list[_RewardCall]] = {}
        for at, (function, target, names) in enumerate(zip(self._functions, self._targets, self._names)):
            columns = {name: plain[name] for name in names}
            if is_batched(function):
                made[at] = _batch(function, target, columns, size, sample, self._where)
                continue
            rows = [{name: values[i] for name, values in columns.items()} for i in range(size)]
            calls = [_RewardCall(function, target, inputs, i, sample, self._where) for i, inputs in enumerate(rows)]
            if is_async(function):
                waiting[at] = calls
            else:
                made[at] = [call.now() for call in calls]
        made |= self._awaited(waiting)
        return [made[at] for at in range(len(self._functions))]

    def metrics(self) -> dict[str, float]:
        """Metrics of the last call: those that opened functions report, and retries per sample, by function."""
        found = dict(self._retried)
        for function, target in zip(self._functions, self._targets):
            if target is not function and hasattr(target, "metrics"):
                found |= {f"{name_of(function)}_{name}": value for name, value in target.metrics().items()}
        return found

    def _awaited(self, waiting: Mapping[int, Sequence[_RewardCall]]) -> dict[int, list[float]]:
        if not waiting:
            return {}
        if self._loop is None:  # kept, so that a function can keep its connections open
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        flat = [call for calls in waiting.values() for call in calls]
        values = iter(_completed(self._loop, _all(flat, self._calls)))
        for at, calls in waiting.items():
            retried = sum(call.retried for call in calls)
            self._retried[f"{name_of(self._functions[at])}_retries"] = retried / max(1, len(calls))
        return {at: [next(values) for _ in calls] for at, calls in waiting.items()}


@dataclass(slots=True)
class _RewardCall:
    """A call of one function on one sample, which `sample(index)` names."""

    function: RewardFunction
    target: Callable[..., Any]
    inputs: dict[str, Any]
    index: int
    sample: Callable[[int], str]
    where: str = ""
    retried: int = 0
    running: asyncio.Task[Any] | None = None

    def now(self) -> float:
        try:
            value = self.target(**self.inputs)
        except CALLED as error:
            if not is_users(error):
                raise
            raise StageError(self.failure(f"raised {message_of(error)}")) from error
        return self.checked(value)

    async def awaited(self, calls: AsyncCalls, gate: asyncio.Semaphore) -> float:
        for attempt in range(calls.retries + 1):
            async with gate:
                running = self.running = asyncio.ensure_future(_coroutine(self.target, self.inputs))
                try:
                    await asyncio.wait({running}, timeout=calls.timeout_s)
                finally:
                    running.cancel()  # too late or no longer needed; not awaited, as it may ignore this
            cause: BaseException | None = None
            if running.done() and running.cancelled():
                what = "raised CancelledError"
            elif not running.done():
                what = f"did not return within {calls.timeout_s:g} s"
            elif cause := _raised(running):
                what = f"raised {message_of(cause)}"
            else:
                return self.checked(running.result())
            if attempt < calls.retries:
                self.retried += 1
                await asyncio.sleep(_RETRY_WAIT_S * 2**attempt)
        raise StageError(self.failure(what + (f" at the last of {attempt + 1} attempts" if attempt else ""))) from cause

    def checked(self, value: object) -> float:
        if isinstance(value, float | Real) and abs(value) <= LARGEST:  # type: ignore[operator]
            return float(value)
        raise StageError(self.failure(f"returned {short(value)}"))

    def failure(self, what: str) -> Problem:
        return _failure(self.function, what, self.inputs, self.sample(self.index), self.where)


class _EndedError(Exception):
    """A function called sys.exit() or raised KeyboardInterrupt, its cause. In a task they would end the event loop."""


async def _coroutine(target: Callable[..., Awaitable[Any]], inputs: dict[str, Any]) -> Any:
    try:
        return await target(**inputs)
    except (SystemExit, KeyboardInterrupt) as error:
        raise _EndedError from error


def _raised(call: asyncio.Task[Any]) -> BaseException | None:
    """What a call that is done raised."""
    error = call.exception()
    return error.__cause__ if isinstance(error, _EndedError) else error


def _completed(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, list[float]]) -> list[float]:
    """Run the loop until the work is done. A function that stops the loop does not stop the others."""
    task = loop.create_task(work)
    while True:
        try:
            return loop.run_until_complete(task)
        except RuntimeError:  # also if the loop was stopped
            if task.done():
                raise


async def _all(calls: Sequence[_RewardCall], limits: AsyncCalls) -> list[float]:
    gate = asyncio.Semaphore(limits.concurrency)
    tasks = [asyncio.ensure_future(call.awaited(limits, gate)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        left: list[asyncio.Task[Any]] = [*tasks, *(call.running for call in calls if call.running)]
        if pending := [task for task in left if not task.done()]:
            await asyncio.wait(pending, timeout=_CLEANUP_S)
        for task in left:
            if task.done() and not task.cancelled():
                task.exception()  # marked as retrieved; only the first failure is raised


def _batch(
    function: RewardFunction,
    target: Callable[..., Any],
    columns: dict[str, Sequence[Any]],
    size: int,
    sample: Callable[[int], str],
    where: str,
) -> list[float]:
    try:
        values = target(**{name: list(column) for name, column in columns.items()})
    except CALLED as error:
        if not is_users(error):
            raise
        index = getattr(error, "index", None)
        if isinstance(index, int) and 0 <= index < size:
            inputs = {name: column[index] for name, column in columns.items()}
            raise StageError(_failure(function, f"raised {message_of(error)}", inputs, sample(index), where)) from error
        raise StageError(
            _failure(function, f"raised {message_of(error)}", columns, f"{size} samples", where)
        ) from error
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != size:
        raise StageError(_failure(function, f"returned {short(values)}", columns, f"{size} samples", where))
    calls = (
        _RewardCall(function, target, {n: c[i] for n, c in columns.items()}, i, sample, where) for i in range(size)
    )
    return [call.checked(value) for call, value in zip(calls, values)]


def _failure(function: RewardFunction, what: str, inputs: Mapping[str, Any], sample: str, where: str) -> Problem:
    shipped = bool(where) and str(getattr(function, "__module__", "")).startswith("ops.rewards")
    called_with = ", ".join(f"{name}={short(value)}" for name, value in inputs.items())
    return Problem(
        where=where if shipped else where_of(function) or where or short(function),
        what=f"reward {name_of(function)} {what} for {sample}, called with {called_with}",
        why="every sample needs a finite number, and an error does not count as a reward of 0",
        fix="correct or remove this row of the data, or use another reward"
        if shipped
        else "handle this input in the function and return a float, or raise timeout_s or retries"
        if is_async(function)
        else "handle this input in the function and return a float"
        if not is_batched(function)
        else "handle this input in the function and return a list with one float per sample",
    )


def opened(function: RewardFunction) -> Callable[..., Any]:
    """Return what to call instead of the function: the result of its `open`, or the function itself."""
    opener = getattr(function, "open", None)
    return opener() if callable(opener) else function


def is_batched(function: object) -> bool:
    """Whether it takes all samples of a task at once."""
    return getattr(function, "batched", False) is True


def name_of(function: object) -> str | None:
    """The function's name; for a callable instance, its `__name__` or its class name in snake case."""
    name = getattr(function, "__name__", None)
    if name is None and _own_call(function) is not None:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(function).__name__).lower()
    return name


def where_of(function: object) -> str | None:
    """File and line of the function's code; None if it has none."""
    unwrapped = inspect.unwrap(function) if callable(function) else function
    code = getattr(unwrapped, "__code__", None) or getattr(_own_call(unwrapped), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None


def parameters_of(function: object) -> list[inspect.Parameter] | None:
    """The function's parameters; None if they cannot be read."""
    if not callable(function):
        return None
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None


def fields_of(function: object) -> list[str]:
    """The fields that it reads: its parameters without a default."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters_of(function) or () if p.kind in named and p.default is p.empty]


def short(value: object) -> str:
    """The value for a message, without memory addresses."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 100
    return re.sub(r" at 0x[0-9a-f]+", "", shortener.repr(value))


def _own_call(function: object) -> Callable[..., Any] | None:
    """`__call__` of an instance whose class defines it in Python."""
    call = getattr(type(function), "__call__", None)  # noqa: B004 - needs the function itself
    return call if isinstance(call, types.FunctionType) else None
