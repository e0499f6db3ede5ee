"""The stage that drops whole groups and has others sampled in their place (dynamic sampling, DAPO, arXiv 2503.14476).

    Filter("zero_spread")                                # all rewards equal: the group would teach nothing
    Filter("zero_spread", of="reward_exact_match")       # of one of several rewards, as the paper does it

    def learnable(reward: list[float], truncated: list[bool]) -> bool:
        return 0.1 < sum(reward) / len(reward) < 0.9 and not all(truncated)

    Filter(learnable, max_rounds=5)

It is a gate. The stages that lead to what it reads see every group that is sampled. All others see the groups that it
keeps and no others; one that starts on a whole batch starts when a batch has been kept. Each dropped group is replaced
by the next prompt at once, so the batch does not depend on which group was ready first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pipeline import Field, Output, Stage, StageContext, StageError, Task
from pipeline.declare.columns import Columns, plain_values
from pipeline.declare.stage import Gate
from pipeline.errors import Problem, message_of, shown
from stages.scoring import fields_of, is_async, name_of, parameters_of, short, where_of
from stages.vocabulary import KEPT, REWARD, field_named

if TYPE_CHECKING:
    from pipeline import Graph, WorkerGroup

RULES = ("zero_spread",)
Rule = Callable[..., bool]

_EXAMPLE = "def learnable(reward: list[float]) -> bool: return 0 < sum(reward) < len(reward)"


@dataclass(frozen=True)
class Filter(Stage):
    """Decides for each group whether it is kept.

    rule        "zero_spread" drops a group whose values of `of` are all equal (arXiv 2503.14476, section 3.2). Or a
                function of one group that returns whether it is kept: its parameter names are fields, as those of a
                reward function are, each a list with one value a sample; `reward_<function>` are numbers
    of          of "zero_spread": the field whose values count. The paper's is right or wrong, so where the reward is a
                sum with a length penalty, name the part: of="reward_exact_match"
    max_rounds  times the batch: the groups that are sampled for one step at most. More are an error, as where a model
                answers every prompt rightly, or none
    on          the worker group; None is the graph's host group

    Metrics of a step: `admitted` (groups sampled), `dropped` (groups) and `acceptance` (the fraction that was kept).
    The metrics of the stages before it, such as `reward/mean`, are means over all groups that were sampled, dropped
    ones included; `advantage/...` and `train/...` are of the batch.
    """

    rule: str | Rule = "zero_spread"
    _: KW_ONLY
    of: str = REWARD.name
    max_rounds: int = 10
    on: WorkerGroup | None = None
    reads: Sequence[Field] = field(init=False)

    name = "filter"
    writes = (KEPT,)
    per = "group"

    def __post_init__(self) -> None:
        names = [self.of] if isinstance(self.rule, str) else fields_of(self.rule)
        object.__setattr__(self, "gate", Gate(KEPT, self.max_rounds))
        object.__setattr__(self, "reads", tuple(made for name in names if (made := _field(name)) and not made.per_step))

    def check(self, graph: Graph) -> Iterable[Problem]:
        """The rule is known, or can be called with fields; and groups are such that it can tell them apart."""
        where = str(self.location)
        if isinstance(self.rule, str):
            yield from self._check_shipped(where, graph.group_size)
        else:
            yield from _rule_problems(self.rule, where)
            if self.of != REWARD.name:
                yield Problem(
                    where=where,
                    what=f"Filter has of={shown(self.of)} and a rule of its own",
                    why="a function says by its parameters what it reads",
                    fix="leave out of=",
                )

    def _check_shipped(self, where: str, group_size: int) -> Iterator[Problem]:
        if self.rule not in RULES:
            near = get_close_matches(str(self.rule), RULES, n=1, cutoff=0.4)
            yield Problem(
                where=where,
                what=f"unknown rule {shown(self.rule)}",
                why=f"known rules are {', '.join(RULES)}, and any function of one group",
                fix=f"did you mean {near[0]!r}?" if near else f"write Filter({RULES[0]!r}), or {_EXAMPLE}",
            )
            return
        made = _field(self.of)
        if made is None or made.per_step or made.ragged or made.inner or made.dtype == "str":
            yield Problem(
                where=where,
                what=f"Filter has of={shown(self.of)}",
                why="zero_spread compares one number a sample with those of the same group",
                fix="of='reward', or of='reward_<function>' where Reward has several functions",
            )
        if group_size == 1:
            yield Problem(
                where=where,
                what="every group has one sample, so zero_spread drops every group",
                why="it compares the samples of one prompt with each other",
                fix="give the stage that makes samples samples_per_prompt=2 or more",
            )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """The runner: columns of whole groups in, `kept` of those that are kept out."""
        import torch

        size = context.group_size
        decide = self._zero_spread if isinstance(self.rule, str) else self._by_function()

        def run(columns: Columns, task: Task) -> Output:
            plain = {made.name: plain_values(columns[made.name]) for made in self.reads}
            dropped = {}
            for position, group in enumerate(task.groups):
                inputs = {name: values[position * size : (position + 1) * size] for name, values in plain.items()}
                reason = decide(inputs, f"group {group} of step {task.step + 1}")
                if reason is not None:
                    dropped[position] = reason
            kept = torch.ones((len(task.groups) - len(dropped)) * size, dtype=torch.bool)
            return Output({KEPT.name: kept}, dropped=dropped)

        return run

    def _zero_spread(self, inputs: dict[str, list[Any]], group: str) -> str | None:
        values = inputs[self.of]
        return f"every {self.of} is {values[0]:g}" if all(value == values[0] for value in values) else None

    def _by_function(self) -> Callable[[dict[str, list[Any]], str], str | None]:
        import numpy

        rule: Any = self.rule

        def decide(inputs: dict[str, list[Any]], group: str) -> str | None:
            try:
                keep = rule(**inputs)
            except Exception as error:
                raise StageError(_failure(rule, f"raised {message_of(error)}", inputs, group)) from error
            if not isinstance(keep, bool | numpy.bool_):
                raise StageError(_failure(rule, f"returned {short(keep)}", inputs, group))
            return None if keep else f"{name_of(rule)}() is False"

        return decide


def _failure(rule: Rule, what: str, inputs: dict[str, list[Any]], group: str) -> Problem:
    called_with = ", ".join(f"{name}={short(value)}" for name, value in inputs.items())
    return Problem(
        where=where_of(rule) or short(rule),
        what=f"filter rule {name_of(rule)} {what} for {group}, called with {called_with}",
        why="every group is kept (True) or dropped (False)",
        fix="handle these values in the function and return a bool",
    )


def _rule_problems(rule: object, where: str) -> Iterator[Problem]:
    name = name_of(rule) if callable(rule) else None
    if not callable(rule):
        what, fix = f"{short(rule)} is neither a rule nor a function", f"write Filter({RULES[0]!r}), or {_EXAMPLE}"
        why = f"known rules are {', '.join(RULES)}, and any function of one group"
        yield Problem(where=where, what=what, why=why, fix=fix)
        return
    if name is None or name == "<lambda>":
        what = f"the rule is {'a lambda' if name else short(rule)}, which has no name of its own"
        why = "the name of a rule is why a group was dropped"
        yield Problem(where=where, what=what, why=why, fix=f"write a def, such as {_EXAMPLE}")
        return
    for what, why, fix in _objections(rule):
        yield Problem(where=where_of(rule) or where, what=f"filter rule {name} {what}", why=why, fix=fix)


def _objections(rule: Any) -> Iterator[tuple[str, str, str]]:
    """Why a function cannot be a rule: what it is, the reason, and what to write instead."""
    if is_async(rule) or inspect.isgeneratorfunction(rule):
        what = f"is {'async' if is_async(rule) else 'a generator'}"
        yield what, "it is called once a group and returns a bool", "write a plain def that returns"
    if not fields_of(rule):
        why = "its parameters without a default are the fields that it reads, and it could not tell groups apart"
        yield "reads no field", why, f"write {_EXAMPLE}"
    for parameter in parameters_of(rule) or ():
        loose = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
        made = _field(parameter.name)
        if loose or (parameter.default is parameter.empty and (made is None or made.per_step)):
            why = "fields are found by name and given by name, one value a sample"
            yield f"has the parameter {parameter}", why, "name each field as an ordinary parameter, such as reward"


def _field(name: object) -> Field | None:
    """The field that a name stands for: of the vocabulary, a part of the reward, or an extra column of the prompts."""
    if not isinstance(name, str):
        return None
    return field_named(name, REWARD.dtype if name.startswith(f"{REWARD.name}_") else "str")
