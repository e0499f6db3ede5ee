"""The stage that turns rewards into advantages. Knows the name of the formula; the formula is in `ops.advantage`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pipeline import Output, Stage, StageContext, Task
from pipeline.columns import Columns
from pipeline.errors import Problem
from stages.vocabulary import ADVANTAGE, REWARD

if TYPE_CHECKING:
    from pipeline import Graph, WorkerGroup

KINDS = ("group_relative",)


@dataclass(frozen=True)
class Advantage(Stage):
    """Advantages within each group, from the rewards of its samples.

    kind  "group_relative": (reward - mean) / (std + eps), as in GRPO; equal rewards give exactly 0
    eps   added to the standard deviation, in units of the reward
    on    the worker group; None is the graph's host group

    Metrics: `zero_spread`, the fraction of groups whose rewards are all equal and which therefore teach nothing, and
    `abs_mean`, the mean size of an advantage.
    """

    kind: str = "group_relative"
    _: KW_ONLY
    eps: float = 1e-6
    on: WorkerGroup | None = None

    name = "advantage"
    reads = (REWARD,)
    writes = (ADVANTAGE,)
    per = "group"

    def check(self, graph: Graph) -> Iterable[Problem]:
        """The kind is known, eps is a number above 0; a warning where every group has one sample."""
        where = str(self.location)
        if self.kind not in KINDS:
            yield Problem(
                where=where,
                what=f"unknown kind of advantage {self.kind!r}",
                why=f"known kinds are {', '.join(KINDS)}",
                fix=f'write Advantage("{KINDS[0]}")',
            )
        if not (isinstance(self.eps, int | float) and math.isfinite(self.eps) and self.eps > 0):
            yield Problem(
                where=where,
                what=f"eps={self.eps!r}",
                why="the standard deviation of a group is divided by, and eps > 0 keeps that from being 0",
                fix="write eps=1e-6",
            )
        if graph.group_size == 1:
            yield Problem(
                where=where,
                what="every group has one sample, so every advantage is 0",
                why="an advantage compares the samples of one prompt with each other",
                fix="give the stage that makes samples samples_per_prompt=2 or more",
                warning=True,
            )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """The runner: rewards of whole groups in, advantages out."""
        from ops.advantage import group_relative, zero_spread_groups

        def run(columns: Columns, task: Task) -> Output:
            reward_N: Any = columns[REWARD.name]
            advantage_N = group_relative(reward_N, context.group_size, self.eps)
            count = len(reward_N) // context.group_size
            return Output(
                {ADVANTAGE.name: advantage_N},
                {
                    "zero_spread": zero_spread_groups(reward_N, context.group_size) / count,
                    "abs_mean": float(advantage_N.abs().mean()),
                },
            )

        return run
