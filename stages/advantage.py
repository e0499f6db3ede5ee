"""Advantage: turns rewards into advantages. Knows the names of the formulas, which are in `ops.advantage`.

Advantage("rloo"), Advantage("dr_grpo", kl=0.01)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pipeline import Output, Stage, StageContext, Task
from pipeline.declare.columns import Columns
from pipeline.declare.parameters import Rule, broken, is_number
from pipeline.errors import Problem, shown
from stages.vocabulary import ADVANTAGE, PREV_LOGPROBS, REF_LOGPROBS, REWARD

if TYPE_CHECKING:
    import torch

    from pipeline import Graph, WorkerGroup

KINDS = ("group_relative", "rloo", "dr_grpo", "reward")


_RULES = (
    Rule(
        "eps",
        lambda value: is_number(value) and value > 0,
        "eps keeps the divisor, a group's standard deviation plus eps, above 0",
        "write eps=1e-6",
    ),
    Rule(
        "kl",
        lambda value: is_number(value) and value >= 0,
        "the KL weight must be a number, 0 (none) or more",
        "write kl=0.0",
    ),
)


@dataclass(frozen=True)
class Advantage(Stage):
    """Computes advantages within each group from the rewards of its samples.

    kind  R is a sample's reward; mean and std are those of its group:
          "group_relative"  (R - mean) / (std + eps): GRPO (arXiv 2402.03300)
          "rloo"            R - mean of the others: RLOO (arXiv 2402.14740)
          "dr_grpo"         R - mean: Dr. GRPO (arXiv 2503.20783)
          "reward"          R: REINFORCE without a baseline; verl does this for a group of one
          with the first three, equal rewards (so also a group of one) give exactly 0
    eps   of "group_relative", in units of the reward; 1e-6 as in verl and NeMo-RL, 1e-4 in TRL
    kl    if above 0, the divergence from the frozen model is first subtracted from each reward: kl times the sum over
          the response of prev_logprobs - ref_logprobs (k1, detached). The stage then reads both, so it runs after the
          logprobs of the whole batch; 0 means none
    on    the worker group; None means the graph's host group

    Metrics: `zero_spread`, the fraction of groups whose rewards are all equal, which teach nothing except with
    "reward"; `abs_mean`, the mean absolute advantage; with `kl`, `kl_in_reward`, the mean divergence of a response in
    nat.
    """

    kind: str = "group_relative"
    _: KW_ONLY
    eps: float = 1e-6
    kl: float = 0.0
    on: WorkerGroup | None = None

    name = "advantage"
    reads = (REWARD,)
    writes = (ADVANTAGE,)
    per = "group"

    def __post_init__(self) -> None:
        if is_number(self.kl) and self.kl > 0:  # `check` reports anything else
            object.__setattr__(self, "reads", (REWARD, PREV_LOGPROBS, REF_LOGPROBS))

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the kind and the ranges of numbers; warn if every group has one sample."""
        where = str(self.location)
        if self.kind not in KINDS:
            yield Problem(
                where=where,
                what=f"unknown kind of advantage {shown(self.kind)}",
                why=f"known kinds are {', '.join(KINDS)}",
                fix=f'write Advantage("{KINDS[0]}")',
            )
        yield from broken(_RULES, self, where=where)
        if graph.group_size == 1 and self.kind != "reward":
            yield Problem(
                where=where,
                what="every group has one sample, so every advantage is 0",
                why="an advantage compares the samples of one prompt with each other",
                fix='set samples_per_prompt=2 or more in the sampling stage, or write Advantage("reward")',
                warning=True,
            )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Return the runner, which computes advantages from the rewards of whole groups."""
        from ops.advantage import zero_spread_groups

        def run(columns: Columns, task: Task) -> Output:
            reward_N: Any = columns[REWARD.name]
            metrics = {}
            if self.kl:
                kl_N = _divergence(columns)
                reward_N = reward_N - self.kl * kl_N
                metrics["kl_in_reward"] = kl_N.mean().item()
            advantage_N = self._advantage(reward_N, context.group_size)
            count = len(reward_N) // context.group_size
            metrics["zero_spread"] = zero_spread_groups(reward_N, context.group_size) / count
            metrics["abs_mean"] = float(advantage_N.abs().mean())
            return Output({ADVANTAGE.name: advantage_N}, metrics)

        return run

    def _advantage(self, reward_N: torch.Tensor, group_size: int) -> torch.Tensor:
        from ops.advantage import group_relative, leave_one_out, mean_centred

        if self.kind == "group_relative":
            return group_relative(reward_N, group_size, self.eps)
        if self.kind == "reward":
            return reward_N.clone()
        return (leave_one_out if self.kind == "rloo" else mean_centred)(reward_N, group_size)


def _divergence(columns: Columns) -> torch.Tensor:
    """The sum of prev - ref over each response, [N] in nat. Each response is summed on its own, so its rounding does
    not depend on the other samples."""
    import torch

    prev: Any = columns[PREV_LOGPROBS.name]
    ref: Any = columns[REF_LOGPROBS.name]
    return torch.stack([(now - then).sum() for now, then in zip(prev.rows(), ref.rows())])
