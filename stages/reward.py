"""Reward: scores samples with functions. Knows which fields they read, not what they measure.

    def brevity(response: str) -> float:
        return 1.0 / (1 + len(response))

    Reward(exact_match, brevity, weights=(1.0, 0.1))

A function's parameter names are the fields it reads: those of `stages.vocabulary`, and any other name as a field of the
annotated type, such as an extra column of `Prompts`; without a type, it has the one of the column. A parameter with a
default is not a field. Values are plain Python: str, float, int, bool, and lists of numbers for fields with one entry
per token. An instance of a class with `__call__` also works; its name is its `__name__` or its class.

An `async` function calls a service for many samples at a time:

    async def judge(prompt: str, response: str) -> float:
        async with session().post(URL, json={"prompt": prompt, "response": response}) as reply:
            return (await reply.json())["score"]

    Reward(math_verify, judge, weights=(1.0, 0.5), concurrency=64, timeout_s=20.0, retries=2)

`stages.scoring` calls the functions. If a function has a method `problems()`, the check reports what it returns: what,
why and fix of each problem.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import TYPE_CHECKING, Any

from pipeline import Field, Output, Stage, StageContext, StageError, Task
from pipeline.declare.calls import is_async, is_generator
from pipeline.declare.columns import Columns, plain_values
from pipeline.declare.fields import ANY
from pipeline.declare.parameters import is_number, is_whole
from pipeline.errors import Problem, counted, problems_of
from stages.scoring import (
    LARGEST,
    AsyncCalls,
    RewardFunction,
    Scorer,
    fields_of,
    is_batched,
    name_of,
    parameters_of,
    short,
    where_of,
)
from stages.vocabulary import REWARD, field_named

if TYPE_CHECKING:
    from pipeline import Graph, WorkerGroup

_CALLS = AsyncCalls()
_TAKEN = ("mean", "std")  # the stage's own metrics
# Parameter names in other libraries' rewards, and what to write instead if no stage writes such a field.
_ELSEWHERE = {
    **dict.fromkeys(
        ("completion", "completions", "responses", "solution_str"),
        "name the parameter response: it is the text of one sample",
    ),
    **dict.fromkeys(("prompts", "question", "questions"), "name the parameter prompt: it is the text of one sample"),
    **dict.fromkeys(
        ("solution", "ground_truth", "target", "label", "reference"),
        "name the parameter answer, and the column of the data in Prompts(..., answer=...)",
    ),
}
_DTYPES = {"float": "float32", "int": "int64", "bool": "bool"}  # for a parameter that is a column of the user's data
_EXAMPLE = "def brevity(response: str) -> float: return 1.0 / (1 + len(response))"


@dataclass(frozen=True, init=False)
class Reward(Stage):
    """Computes the weighted sum of reward functions for each sample.

    functions    functions that return a finite number; by position, or as a sequence by name
    weights      one per function; None means 1.0 each
    on           the worker group; None means the graph's host group
    name         the stage's name in the graph
    concurrency  async functions: concurrent calls per worker
    timeout_s    async functions: time limit of one attempt, in seconds
    retries      async functions: attempts after one that raised or timed out. If the last one fails, it is an error

    Writes `reward`, and with several functions also `reward_<function>`, before weighting. Metrics: `mean`; `std`, the
    mean over groups of the standard deviation within a group (G - 1), which does not depend on how a batch is split
    into tasks; the mean of each function under its name; `<function>_retries` of async ones (retries per sample); and
    metrics that a function reports itself, such as `math_verify_timeouts`.
    """

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...] | None
    on: WorkerGroup | None
    name: str
    concurrency: int
    timeout_s: float
    retries: int
    reads: Sequence[Field] = field(init=False)
    writes: Sequence[Field] = field(init=False)

    per = "group"

    def __init__(
        self,
        *function: RewardFunction,
        functions: Sequence[RewardFunction] = (),
        weights: Sequence[float] | float | None = None,
        on: WorkerGroup | None = None,
        name: str = "reward",
        concurrency: int = _CALLS.concurrency,
        timeout_s: float = _CALLS.timeout_s,
        retries: int = _CALLS.retries,
    ) -> None:
        every = (*function, *(functions if isinstance(functions, list | tuple) else (functions,)))
        parts = [_part(each) for each in every] if len(every) > 1 else []
        reads = _together([made for each in every for made in reads_of(each)])
        values = {
            "functions": every,
            "weights": _weights(weights),
            "on": on,
            "name": name,
            "concurrency": concurrency,
            "timeout_s": timeout_s,
            "retries": retries,
            "reads": tuple(made for made in reads if made and not made.per_step),
            "writes": (REWARD, *dict.fromkeys(made for made in parts if made)),
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    @property
    def calls(self) -> AsyncCalls:
        """The limits of its async functions."""
        return AsyncCalls(self.concurrency, self.timeout_s, self.retries)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check that functions can be called with fields, names differ, and weights fit."""
        where = str(self.location)
        if not self.functions:
            yield _problem(
                where, "Reward() has no function", "a reward is the sum of functions", "write Reward(exact_match)"
            )
        for function in self.functions:
            yield from function_problems(function, where)
        yield from self._call_problems(where)
        names = [name_of(function) for function in self.functions]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield _problem(
                where,
                f"{names.count(name)} reward functions are named {name}",
                "each function has its own field and metric",
                "rename or omit one of them",
            )
        yield from self._weight_problems(where)

    def _weight_problems(self, where: str) -> Iterator[Problem]:
        given, ones = self.weights, f"write weights={(1.0,) * len(self.functions)}"
        if given is None:
            return
        if not isinstance(given, tuple):
            yield _problem(where, f"weights={short(given)}", "weights are numbers, in the order of the functions", ones)
            return
        if len(given) != len(self.functions):
            counts = f"{counted(len(given), 'weight')} for {counted(len(self.functions), 'function')}"
            yield _problem(where, counts, "each function has one weight, in the same order", ones)
        for weight in given:
            if not (isinstance(weight, int | float) and math.isfinite(weight)):
                yield _problem(where, f"weight {short(weight)}", "a weight must be a finite number", "write 1.0")

    def _call_problems(self, where: str) -> Iterator[Problem]:
        for name, least in (("concurrency", 1), ("timeout_s", None), ("retries", 0)):
            value, default = getattr(self.calls, name), getattr(_CALLS, name)
            legal = is_number(value) and value > 0 if least is None else is_whole(value, least)
            if not legal:
                rule = "seconds, above 0" if least is None else f"a whole number, {least} or more"
                yield _problem(where, f"Reward has {name}={value!r}", f"it is {rule}", f"{name}={default}")
        if self.calls != _CALLS and not any(is_async(function) for function in self.functions):
            yield _problem(
                where,
                "Reward has concurrency, timeout_s or retries and no async function",
                "they apply to async functions only",
                "omit them",
            )

    def replayed(self, sample: Mapping[str, Any], context: StageContext, *, live: bool) -> tuple[list[str], bool]:
        """Score a kept sample again. Returns the rewards, and whether they are as before."""
        made: Any = self.setup(context)(
            {one.name: [sample[one.name]] for one in self.reads}, Task(stage=self.name, step=0)
        )
        found = {name: float(column[0]) for name, column in made.columns.items()}
        lines = [f"its reward: {name} is {value:g}, and was {sample[name]:g}" for name, value in found.items()]
        return lines, all(abs(value - sample[name]) < 1e-3 for name, value in found.items())

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Open the functions that need it, such as math-verify's processes. The runner calls each on each sample."""
        import torch

        weights = self.weights or (1.0,) * len(self.functions)
        scorer = Scorer(self.functions, self.calls, str(self.location))

        def run(columns: Columns, task: Task) -> Output:
            plain = {made.name: plain_values(columns[made.name]) for made in self.reads}
            samples = _TaskSamples(task.step, task.groups, context.group_size)
            scores = scorer.scores(plain, len(next(iter(plain.values()))), samples.name)
            total = [sum(map(mul, weights, row)) for row in zip(*scores)]
            for i, value in enumerate(total):
                if abs(value) > LARGEST:
                    raise StageError(_too_large(value, [row[i] for row in scores], str(self.location), samples.name(i)))
            out = {REWARD.name: total}
            if len(self.functions) > 1:
                out |= {made.name: row for made, row in zip(self.writes[1:], scores)}
            metrics = {f"{name_of(function)}": _mean(row) for function, row in zip(self.functions, scores)}
            metrics |= scorer.metrics() | {"mean": _mean(total), "std": _spread(total, context.group_size)}
            return Output({name: torch.tensor(row, dtype=torch.float32) for name, row in out.items()}, metrics)

        return run


@dataclass(frozen=True)
class _TaskSamples:
    """The samples of a task, for messages."""

    step: int
    groups: Sequence[int]
    group_size: int

    def name(self, index: int) -> str:
        group, member = divmod(index, self.group_size)
        admission = f" (group {self.groups[group]}, member {member})" if group < len(self.groups) else ""
        return f"sample {index} of step {self.step + 1}{admission}"


def _too_large(total: float, scores: Sequence[float], where: str, sample: str) -> Problem:
    return _problem(
        where,
        f"the weighted sum of {', '.join(map(str, scores))} is {total} for {sample}",
        "a reward is a float32",
        "use smaller weights",
    )


def function_problems(function: RewardFunction, where: str) -> Iterator[Problem]:
    """Problems of one function; `where` is where it is used."""
    name = name_of(function)
    if not callable(function):
        fix = _EXAMPLE
        if isinstance(function, list | tuple):
            fix = f"write Reward({', '.join(str(name_of(one)) for one in function)})"
        elif isinstance(function, str) and function.isidentifier():
            fix = f"import it, and write Reward({function})"
        yield _problem(where, f"{short(function)} is not a function", "a reward is called once per sample", fix)
        return
    if isinstance(function, type):
        yield _problem(
            where, f"{name} is a class", "calling it makes an instance, not a reward", f"pass an instance: {name}(...)"
        )
        return
    if name is None or name == "<lambda>":
        yield _problem(
            where,
            f"{'a lambda' if name else short(function)} has no name of its own",
            "a reward's name is used for its metric and field, and in error messages",
            f"write a def, such as {_EXAMPLE}",
        )
        return
    if callable(getattr(function, "problems", None)):
        yield from problems_of(
            function.problems,  # type: ignore[attr-defined]
            says=f"problems() of reward {name}",
            where=where,
            why="it yields what, why and fix of each wrong parameter",
            fix=f"correct problems() of {name}",
        )
    where = where_of(function) or where
    if is_generator(function):
        yield _problem(
            where, f"reward {name} is a generator", "one call returns one number", "return it, do not yield it"
        )
    if is_async(function) and is_batched(function):
        yield _problem(
            where,
            f"reward {name} is async and batched",
            "it is called either once per sample or once for all",
            "omit one of the two",
        )
    if name in _TAKEN or _part(function) is None:
        yield _problem(
            where,
            f"reward function is named {name}",
            f"its field would be reward_{name}; names are lower-case letters, digits and underscores, and not "
            + " or ".join(_TAKEN),
            "rename the function",
        )
    parameters = parameters_of(function)
    if parameters is None:
        yield _problem(
            where, f"the signature of {name} cannot be read", "parameter names are fields", f"write {_EXAMPLE}"
        )
        return
    for parameter in parameters:
        yield from _parameter_problems(parameter, name, where)
    if not parameters or all(parameter.default is not parameter.empty for parameter in parameters):
        yield _problem(where, f"reward {name} reads no field", "it cannot tell samples apart", f"write {_EXAMPLE}")


def _parameter_problems(parameter: inspect.Parameter, name: str, where: str) -> Iterator[Problem]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        yield _problem(
            where,
            f"reward {name} has the parameter {parameter}"
            + (" before a /" if parameter.kind is parameter.POSITIONAL_ONLY else ""),
            "fields are found and passed by name",
            "make each field an ordinary parameter",
        )
    elif parameter.default is parameter.empty:
        made = field_named(parameter.name)
        if made is None or made.per_step:
            yield _problem(
                where,
                f"reward {name} has the parameter {parameter.name}",
                "it names a field with weights" if made else "no field can have this name",
                "use the name of a field, such as response or answer",
            )
        elif wrong := _wrong_type(parameter.annotation, made):
            yield _problem(
                where,
                f"reward {name} has the parameter {parameter.name} with another type than its field",
                f"the field {made.name} has a {wrong} per sample",
                f"write {made.name}: {wrong}, or leave the type out",
            )


def _wrong_type(annotation: Any, read: Field) -> str:
    """The type of a standard field's values, if a parameter is annotated with another plain type; "" if not."""
    given = getattr(annotation, "__name__", annotation)
    is_standard = field_named(read.name, "bool") == field_named(read.name, "str")
    plain = "list" if read.ragged else {dtype: name for name, dtype in _DTYPES.items()}.get(read.dtype, "str")
    return plain if is_standard and given in ("str", *_DTYPES) and given != plain else ""


def reads_of(function: object) -> list[Field | None]:
    """The fields of its parameters. A column of the user's data has the annotated type, or any."""
    annotations = {parameter.name: parameter.annotation for parameter in parameters_of(function) or ()}
    made = []
    for name in fields_of(function):
        annotation = annotations[name]
        given = getattr(annotation, "__name__", annotation)
        read = field_named(name, ANY if annotation is inspect.Parameter.empty else _DTYPES.get(given, "str"))
        made.append(replace(read, hint=_ELSEWHERE[name]) if read and name in _ELSEWHERE else read)
    return made


def _together(reads: Sequence[Field | None]) -> list[Field | None]:
    """Each field once; without a type only if no function has given it one."""
    typed = {made.name for made in reads if made and made.dtype != ANY}
    return [made for made in dict.fromkeys(reads) if not (made and made.dtype == ANY and made.name in typed)]


def _part(function: object) -> Field | None:
    return field_named(f"reward_{name_of(function)}", REWARD.dtype)


def _weights(given: Any) -> Any:
    """A single number or any sequence as a tuple; `check` reports anything else."""
    if isinstance(given, int | float):
        return (given,)
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else given


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _spread(values: Sequence[float], group_size: int) -> float:
    groups = [values[first : first + group_size] for first in range(0, len(values), group_size)]
    return _mean([_deviation(group) for group in groups])


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); 0 for one value. The statistics module is exact but forty times slower."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _problem(where: str, what: str, why: str, fix: str) -> Problem:
    return Problem(where=where, what=what, why=why, fix=fix)
