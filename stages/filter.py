"""Filter: drops whole groups; other prompts are sampled instead (dynamic sampling, DAPO, arXiv 2503.14476).

    Filter("zero_spread")                                # all rewards equal: the group would teach nothing
    Filter("complete")                                   # an episode of the group was lost: its machine failed
    Filter("zero_spread", of="reward_exact_match")       # uses one of several rewards, as in the paper

    def learnable(reward: list[float], truncated: list[bool]) -> bool:
        return 0.1 < sum(reward) / len(reward) < 0.9 and not all(truncated)

    Filter(learnable, max_rounds=5)

The stage is a gate. Stages that produce its inputs get every sampled group; all others get only the groups that it
keeps. A stage that needs a whole batch starts once a whole batch has been kept. The next prompt replaces a dropped
group, and a batch is the first groups in order that are kept, so it does not depend on which group finishes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pipeline import Field, Output, Stage, StageContext, StageError, Task
from pipeline.declare.calls import is_async, is_generator
from pipeline.declare.columns import Columns, plain_values
from pipeline.declare.parameters import broken, number
from pipeline.declare.stage import Gate
from pipeline.errors import CALLED, Problem, is_users, message_of, shown
from stages.scoring import fields_of, name_of, parameters_of, short, where_of
from stages.vocabulary import END, KEPT, LOST, REWARD, field_named

if TYPE_CHECKING:
    from pipeline import Graph, WorkerGroup

RULES = ("zero_spread", "complete")
Rule = Callable[..., bool]

_EXAMPLE = "def learnable(reward: list[float]) -> bool: return 0 < sum(reward) < len(reward)"
_LOST = number("lost", lambda value: 0 <= value <= 1, why="lost must be a fraction of the groups of a step", fix=0.2)


@dataclass(frozen=True)
class Filter(Stage):
    """Keeps or drops each group.

    rule        "zero_spread" drops a group whose values of `of` are all equal (arXiv 2503.14476, section 3.2);
                "complete" drops one with a lost episode (stages/episode/stage.py). Or a
                function of one group that returns whether to keep it: as in a reward function, its parameters name
                fields; each is a list with one value per sample. `reward_<function>` are numbers
    episodes    whether a group with a lost episode is dropped before the rule is asked
    lost        the largest fraction of the groups sampled for a step that may be dropped for lost episodes; above it,
                the run ends with the commonest reasons. One group may be lost in any step, unless it is 0
    of          for "zero_spread": the field to compare. The paper compares correctness, so if the reward also contains
                a length penalty, name the part: of="reward_exact_match"
    max_rounds  maximum number of groups sampled for one step, as a multiple of the batch. More are an error, as when a
                model answers every prompt correctly, or none
    on          the worker group; None means the graph's host group

    Metrics of a step: `admitted` (groups sampled), `dropped` (groups) and `acceptance` (the fraction kept). Metrics of
    earlier stages, such as `reward/mean`, are means over all sampled groups, dropped ones included; `advantage/...` and
    `train/...` cover the batch only.
    """

    rule: str | Rule = "zero_spread"
    _: KW_ONLY
    of: str = REWARD.name
    episodes: bool = False
    lost: float = 0.2
    max_rounds: int = 10
    on: WorkerGroup | None = None
    reads: Sequence[Field] = field(init=False)

    name = "filter"
    writes = (KEPT,)
    per = "group"

    def __post_init__(self) -> None:
        names = fields_of(self.rule) if not isinstance(self.rule, str) else [] if self.is_complete else [self.of]
        names += [END.name] if self._ends and END.name not in names else []
        object.__setattr__(self, "gate", Gate(KEPT, self.max_rounds, LOST if self._ends else "", self.lost))
        object.__setattr__(self, "reads", tuple(made for name in names if (made := _field(name)) and not made.per_step))

    @property
    def is_complete(self) -> bool:
        """Whether it drops groups with lost episodes and no others."""
        return isinstance(self.rule, str) and self.rule == "complete"

    @property
    def _ends(self) -> bool:
        """Whether it looks for lost episodes."""
        return self.episodes is True or self.is_complete

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check that the rule is known or can be called with fields, and that it can tell groups apart."""
        where = str(self.location)
        yield from broken([_LOST], self, where=where, says=f"stage {self.name!r} has {{}}")
        if isinstance(self.rule, str):
            yield from self._check_shipped(where, graph.group_size)
        else:
            yield from _rule_problems(self.rule, where)
            if self.of != REWARD.name:
                yield Problem(
                    where=where,
                    what=f"Filter has of={shown(self.of)} and a function as its rule",
                    why="a function's parameters are the fields that it reads",
                    fix="leave out of=",
                )

    def _check_shipped(self, where: str, group_size: int) -> Iterator[Problem]:
        if self.rule not in RULES:
            near = get_close_matches(str(self.rule), RULES, n=1, cutoff=0.4)
            yield Problem(
                where=where,
                what=f"unknown rule {shown(self.rule)}",
                why=f"a rule is {', '.join(RULES)} or a function of one group",
                fix=f"did you mean {near[0]!r}?" if near else f"write Filter({RULES[0]!r}), or {_EXAMPLE}",
            )
            return
        if self.is_complete:
            return
        made = _field(self.of)
        if made is None or made.per_step or made.ragged or made.inner or made.dtype == "str":
            yield Problem(
                where=where,
                what=f"Filter has of={shown(self.of)}",
                why="zero_spread compares one number per sample within a group",
                fix="of='reward', or of='reward_<function>' if Reward has several functions",
            )
        if group_size == 1:
            yield Problem(
                where=where,
                what="every group has one sample, so zero_spread drops every group",
                why="it compares the samples of one prompt with each other",
                fix="set samples_per_prompt=2 or more in the sampling stage",
            )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Return the runner, which reads columns of whole groups and writes `kept` of those to keep."""
        import torch

        size = context.group_size
        decide = self._zero_spread if isinstance(self.rule, str) else self._by_function()
        own = {END.name} - set(fields_of(self.rule) if callable(self.rule) else ())  # which the rule does not get

        def run(columns: Columns, task: Task) -> Output:
            plain = {made.name: plain_values(columns[made.name]) for made in self.reads}
            dropped = {}
            for position, group in enumerate(task.groups):
                inputs = {name: values[position * size : (position + 1) * size] for name, values in plain.items()}
                reason = next((end for end in inputs.get(END.name, ()) if end.startswith(LOST)), None)
                if reason is None and not self.is_complete:
                    asked = {name: values for name, values in inputs.items() if name not in own}
                    reason = decide(asked, f"group {group} of step {task.step + 1}")
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
            except CALLED as error:
                if not is_users(error):
                    raise
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
        why = f"a rule is {', '.join(RULES)} or a function of one group"
        yield Problem(where=where, what=what, why=why, fix=fix)
        return
    if name is None or name == "<lambda>":
        what = f"the rule is {'a lambda' if name else short(rule)}, which has no name of its own"
        why = "the record names the rule that dropped a group"
        yield Problem(where=where, what=what, why=why, fix=f"write a def, such as {_EXAMPLE}")
        return
    for what, why, fix in _objections(rule):
        yield Problem(where=where_of(rule) or where, what=f"filter rule {name} {what}", why=why, fix=fix)


def _objections(rule: Any) -> Iterator[tuple[str, str, str]]:
    """Reasons why a function cannot be a rule, as (what, why, fix)."""
    if is_async(rule) or is_generator(rule):
        what = f"is {'async' if is_async(rule) else 'a generator'}"
        yield what, "it is called once per group and returns a bool", "write a plain def that returns a bool"
    if not fields_of(rule):
        why = "parameters without a default are fields, and without one it cannot tell groups apart"
        yield "reads no field", why, f"write {_EXAMPLE}"
    for parameter in parameters_of(rule) or ():
        loose = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
        made = _field(parameter.name)
        if loose or (parameter.default is parameter.empty and (made is None or made.per_step)):
            why = "fields are found and passed by name, one value per sample"
            yield f"has the parameter {parameter}", why, "make each field an ordinary parameter, such as reward"


def _field(name: object) -> Field | None:
    """The field with this name: a standard field, a part of the reward, or an extra column of the prompts."""
    if not isinstance(name, str):
        return None
    return field_named(name, REWARD.dtype if name.startswith(f"{REWARD.name}_") else "str")
