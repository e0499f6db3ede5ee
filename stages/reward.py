"""The stage that scores samples with plain functions. Knows how to call them, not what they measure.

    def brevity(response: str) -> float:
        return 1.0 / (1 + len(response))

    Reward(exact_match, brevity, weights=(1.0, 0.1))

The parameter names of a function are the fields it reads: those of `stages.vocabulary`, and any other name as a str
field, such as an extra column of `Prompts`. A parameter with a default is the function's own. Values are plain Python:
str, float, int, bool, and lists of numbers for fields that have one entry a token.
"""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import mul
from typing import TYPE_CHECKING, Any

from pipeline import Field, Output, Stage, StageContext, StageError, Task
from pipeline.columns import Column, Columns, Ragged
from pipeline.errors import Problem
from stages import vocabulary
from stages.vocabulary import REWARD

if TYPE_CHECKING:
    from pipeline import Graph, WorkerGroup

RewardFunction = Callable[..., float]

_KNOWN = {value.name: value for value in vars(vocabulary).values() if isinstance(value, Field)}
_LARGEST = (2 - 2**-23) * 2.0**127  # float32
_TAKEN = ("mean", "std")  # names of the stage's own metrics
_EXAMPLE = "def brevity(response: str) -> float: return 1.0 / (1 + len(response))"


@dataclass(frozen=True, init=False)
class Reward(Stage):
    """The weighted sum of reward functions, for each sample.

    functions  plain functions that return a finite number
    weights    one each; None is 1.0 each
    on         the worker group; None is the graph's host group
    name       of the stage in the graph

    Writes `reward`, and with several functions also `reward_<function>`, before weighting. Metrics: `mean`; `std`, the
    mean over groups of the standard deviation within a group (G - 1), which does not depend on how a batch is cut into
    tasks; and the mean of each function under its name.
    """

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...] | None
    on: WorkerGroup | None
    name: str
    reads: Sequence[Field]
    writes: Sequence[Field]

    per = "group"

    def __init__(
        self,
        *functions: RewardFunction,
        weights: Sequence[float] | float | None = None,
        on: WorkerGroup | None = None,
        name: str = "reward",
    ) -> None:
        parts = [_part(function) for function in functions] if len(functions) > 1 else []
        reads = dict.fromkeys(_field(parameter) for function in functions for parameter in _fields_of(function))
        values = {
            "functions": functions,
            "weights": (weights,) if isinstance(weights, int | float) else weights and tuple(weights),
            "on": on,
            "name": name,
            "reads": tuple(made for made in reads if made),
            "writes": (REWARD, *dict.fromkeys(made for made in parts if made)),
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Each function can be called with fields, their names differ, and the weights fit."""
        where = str(self.location)
        if not self.functions:
            yield _problem(
                where, "Reward() has no function", "a reward is the sum of functions", "write Reward(exact_match)"
            )
        for function in self.functions:
            yield from _function_problems(function, where)
        names = [_name(function) for function in self.functions]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield _problem(
                where,
                f"{names.count(name)} reward functions are named {name}",
                "each function has its own field and metric",
                "rename one of them, or leave it out",
            )
        if self.weights is not None and len(self.weights) != len(self.functions):
            yield _problem(
                where,
                f"{len(self.weights)} weights for {len(self.functions)} functions",
                "each function has one weight, in the same order",
                f"write weights={(1.0,) * len(self.functions)}",
            )
        for weight in self.weights or ():
            if not (isinstance(weight, int | float) and math.isfinite(weight)):
                yield _problem(where, f"weight {weight!r}", "a weight is a finite number", "write 1.0")

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """The runner: calls every function once a sample."""
        import torch

        weights = self.weights or (1.0,) * len(self.functions)
        fields_of = [_fields_of(function) for function in self.functions]

        def run(columns: Columns, task: Task) -> Output:
            plain = {made.name: _plain(columns[made.name]) for made in self.reads}
            samples = _Samples(task.step, task.groups, context.group_size)
            scores = [
                [_call(function, dict(zip(names, values)), samples, i) for i, values in enumerate(_rows(plain, names))]
                for function, names in zip(self.functions, fields_of)
            ]
            total = [sum(map(mul, weights, row)) for row in zip(*scores)]
            for i, value in enumerate(total):
                if abs(value) > _LARGEST:
                    raise StageError(_too_large(value, [row[i] for row in scores], str(self.location), samples.name(i)))
            out = {REWARD.name: total}
            if len(self.functions) > 1:
                out |= {made.name: row for made, row in zip(self.writes[1:], scores)}
            metrics = {function.__name__: _mean(row) for function, row in zip(self.functions, scores)}
            metrics |= {"mean": _mean(total), "std": _spread(total, context.group_size)}
            return Output({name: torch.tensor(row, dtype=torch.float32) for name, row in out.items()}, metrics)

        return run


@dataclass(frozen=True)
class _Samples:
    """The samples of a task, for messages."""

    step: int
    groups: Sequence[int]
    group_size: int

    def name(self, index: int) -> str:
        group, member = divmod(index, self.group_size)
        admission = f" (group {self.groups[group]}, member {member})" if group < len(self.groups) else ""
        return f"sample {index} of step {self.step + 1}{admission}"


def _rows(plain: Mapping[str, Sequence[Any]], names: Sequence[str]) -> Iterable[tuple[Any, ...]]:
    """The values of `names`, one tuple a sample; also where a function takes none."""
    if not names:
        return [()] * len(next(iter(plain.values())))
    return zip(*(plain[name] for name in names))


def _call(function: RewardFunction, inputs: dict[str, Any], samples: _Samples, index: int) -> float:
    try:
        value = function(**inputs)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise StageError(_failure(function, f"raised {text}", inputs, samples.name(index))) from error
    if isinstance(value, float | Real) and abs(value) <= _LARGEST:
        return float(value)
    raise StageError(_failure(function, f"returned {_short(value)}", inputs, samples.name(index)))


def _failure(function: RewardFunction, what: str, inputs: dict[str, Any], sample: str) -> Problem:
    called_with = ", ".join(f"{name}={_short(value)}" for name, value in inputs.items())
    return _problem(
        _where(function) or _short(function),
        f"reward {_name(function)} {what} for {sample}, called with {called_with}",
        "every sample needs a finite number, and an error is not taken for a reward of 0",
        "handle this input in the function and return a float",
    )


def _too_large(total: float, scores: Sequence[float], where: str, sample: str) -> Problem:
    return _problem(
        where,
        f"the weighted sum of {', '.join(map(str, scores))} is {total} for {sample}",
        "a reward is a float32",
        "use smaller weights",
    )


def _function_problems(function: RewardFunction, where: str) -> Iterator[Problem]:
    name = _name(function)
    if not callable(function):
        yield _problem(where, f"{_short(function)} is not a function", "a reward is called once a sample", _EXAMPLE)
        return
    if name is None or name == "<lambda>":
        yield _problem(
            where,
            f"{'a lambda' if name else _short(function)} has no name of its own",
            "the name of a reward is that of its metric and field, and what an error points at",
            f"write a def, such as {_EXAMPLE}",
        )
        return
    where = _where(function) or where
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        yield _problem(
            where, f"reward {name} is async", "rewards are called one after the other", "write def, not async def"
        )
    if name in _TAKEN or _part(function) is None:
        yield _problem(
            where,
            f"reward function is named {name}",
            f"its field would be reward_{name}; names are lower-case letters, digits and underscores, and not "
            + " or ".join(_TAKEN),
            "rename the function",
        )
    parameters = _parameters(function)
    if parameters is None:
        yield _problem(
            where, f"the signature of {name} cannot be read", "parameter names are fields", f"write {_EXAMPLE}"
        )
        return
    for parameter in parameters:
        yield from _parameter_problems(parameter, name, where)
    if not parameters or all(parameter.default is not parameter.empty for parameter in parameters):
        yield _problem(where, f"reward {name} reads no field", "it could not tell samples apart", f"write {_EXAMPLE}")


def _parameter_problems(parameter: inspect.Parameter, name: str, where: str) -> Iterator[Problem]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        yield _problem(
            where,
            f"reward {name} has the parameter {parameter}"
            + (" before a /" if parameter.kind is parameter.POSITIONAL_ONLY else ""),
            "fields are found by name and given by name",
            "name each field as an ordinary parameter",
        )
    elif parameter.default is parameter.empty:
        made = _field(parameter.name)
        if made is None or made.per_step:
            yield _problem(
                where,
                f"reward {name} has the parameter {parameter.name}",
                "it names a field with weights" if made else "no field can have this name",
                "use the name of a field, such as response or answer",
            )


def _parameters(function: object) -> list[inspect.Parameter] | None:
    if not callable(function):
        return None
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None


def _fields_of(function: object) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in _parameters(function) or () if p.kind in named and p.default is p.empty]


def _field(name: str) -> Field | None:
    return _KNOWN.get(name) or _made(name, "str")


def _part(function: object) -> Field | None:
    return _made(f"reward_{_name(function)}", REWARD.dtype)


def _made(name: str, dtype: str) -> Field | None:
    try:
        return Field(name, dtype=dtype)
    except ValueError:  # check() says so
        return None


def _name(function: object) -> str | None:
    return getattr(function, "__name__", None)


def _where(function: Callable[..., Any]) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None


def _short(value: object) -> str:
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 100
    return shortener.repr(value)


def _plain(column: Column) -> list[Any]:
    if isinstance(column, Ragged):
        return [row.tolist() for row in column.rows()]
    return column if isinstance(column, list) else column.tolist()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _spread(values: Sequence[float], group_size: int) -> float:
    groups = [values[first : first + group_size] for first in range(0, len(values), group_size)]
    return _mean([_deviation(group) for group in groups])


def _deviation(values: Sequence[float]) -> float:
    """Of a sample, by n - 1; 0 for one value. The statistics module computes it exactly, at forty times the time."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _problem(where: str, what: str, why: str, fix: str) -> Problem:
    return Problem(where=where, what=what, why=why, fix=fix)
