"""Advantage: turns rewards into advantages. Knows the names of the formulas, which are in `ops.advantage`.

Advantage("rloo"), Advantage("dr_grpo", kl=0.01), Advantage("turn", discount=0.9)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pipeline import Field, Output, Stage, StageContext, Task
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.parameters import Rule, broken, is_number
from pipeline.errors import Problem, shown
from stages.vocabulary import (
    ADVANTAGE,
    PREV_LOGPROBS,
    REF_LOGPROBS,
    REWARD,
    TOKEN_ADVANTAGES,
    TOKEN_VERSIONS,
    TURN_ENDS,
    TURN_REWARDS,
)

if TYPE_CHECKING:
    import torch

    from pipeline import Graph, WorkerGroup

TURN = "turn"
KINDS = ("group_relative", "rloo", "dr_grpo", "reward", TURN)


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
    Rule(
        "discount",
        lambda value: is_number(value) and 0 <= value <= 1,
        "the discount of later turns must be a number from 0 to 1",
        "write discount=1.0",
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
          "turn"            an advantage per turn of an episode, for Train(advantage="token"): R is added to the last
                            of the turn rewards, these are normalised over all turns of the group as in
                            "group_relative", and a turn has the sum of its own and the later ones: process supervision
                            of GRPO (arXiv 2402.03300, section 4.1.3)
          but for "reward", equal rewards (so also a group of one turn) give exactly 0
    eps   of "group_relative" and "turn", in units of the reward; 1e-6 as in verl and NeMo-RL, 1e-4 in TRL
    discount  of "turn": the factor of the next turn's reward, its square for the one after it; 1 is the paper's
    kl    if above 0, the divergence from the frozen model is first subtracted from each reward: kl times the sum over
          the tokens that the policy drew of prev_logprobs - ref_logprobs (k1, detached). The stage then reads both, so
          it runs after the logprobs of the whole batch; 0 means none
    on    the worker group; None means the graph's host group

    Metrics: `zero_spread`, the fraction of groups whose rewards are all equal, which teach nothing except with
    "reward"; `abs_mean`, the mean absolute advantage; with `kl`, `kl_in_reward`, the mean divergence of a response in
    nat.
    """

    kind: str = "group_relative"
    _: KW_ONLY
    eps: float = 1e-6
    discount: float = 1.0
    kl: float = 0.0
    on: WorkerGroup | None = None

    name = "advantage"
    reads = (REWARD,)
    writes = (ADVANTAGE,)
    per = "group"

    def __post_init__(self) -> None:
        reads: tuple[Field, ...] = (REWARD,)
        if self.kind == TURN:
            reads = (*reads, TURN_REWARDS, TURN_ENDS, TOKEN_VERSIONS)
            object.__setattr__(self, "writes", (TOKEN_ADVANTAGES,))
        if is_number(self.kl) and self.kl > 0:  # `check` reports anything else
            reads = (*reads, PREV_LOGPROBS, REF_LOGPROBS, TOKEN_VERSIONS)
        object.__setattr__(self, "reads", tuple(dict.fromkeys(reads)))

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
        if self.kind in KINDS and self.kind != TURN and self.discount != 1.0:
            yield Problem(
                where=where,
                what=f"Advantage({self.kind!r}) has discount={shown(self.discount)}",
                why="a discount is that of later turns",
                fix=f'write Advantage("{TURN}", discount={shown(self.discount)})',
            )
        if graph.group_size == 1 and self.kind not in ("reward", TURN):
            yield Problem(
                where=where,
                what="every group has one sample, so every advantage is 0",
                why="an advantage compares the samples of one prompt with each other",
                fix='set samples_per_prompt=2 or more in the sampling stage, or write Advantage("reward")',
                warning=True,
            )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Return the runner, which computes advantages from the rewards of whole groups."""
        import torch

        from ops.advantage import zero_spread_groups

        def run(columns: Columns, task: Task) -> Output:
            reward_N: Any = columns[REWARD.name]
            metrics = {}
            if self.kl:
                kl_N = _divergence(columns)
                reward_N = reward_N - self.kl * kl_N
                metrics["kl_in_reward"] = kl_N.mean().item()
            size = context.group_size
            count = len(reward_N) // size
            if self.kind == TURN:
                turns = self._of_turns(columns, reward_N, size)
                groups = [torch.cat(turns[first : first + size]) for first in range(0, len(turns), size)]
                metrics["zero_spread"] = sum(not each.any() for each in groups) / count
                metrics["abs_mean"] = float(torch.cat(groups).abs().mean())
                return Output({TOKEN_ADVANTAGES.name: _of_tokens(columns, turns)}, metrics)
            advantage_N = self._advantage(reward_N, size)
            metrics["zero_spread"] = zero_spread_groups(reward_N, size) / count
            metrics["abs_mean"] = float(advantage_N.abs().mean())
            return Output({ADVANTAGE.name: advantage_N}, metrics)

        return run

    def _of_turns(self, columns: Columns, reward_N: torch.Tensor, group_size: int) -> list[torch.Tensor]:
        from ops.advantage import turn_relative

        rewards: Any = columns[TURN_REWARDS.name]
        return turn_relative(rewards.rows(), reward_N, group_size, self.discount, self.eps)

    def _advantage(self, reward_N: torch.Tensor, group_size: int) -> torch.Tensor:
        from ops.advantage import group_relative, leave_one_out, mean_centred

        if self.kind == "group_relative":
            return group_relative(reward_N, group_size, self.eps)
        if self.kind == "reward":
            return reward_N.clone()
        return (leave_one_out if self.kind == "rloo" else mean_centred)(reward_N, group_size)


def _divergence(columns: Columns) -> torch.Tensor:
    """The sum of prev - ref over the drawn tokens of each response, [N] in nat. Each response is summed on its own, so
    its rounding does not depend on the other samples."""
    import torch

    prev: Any = columns[PREV_LOGPROBS.name]
    ref: Any = columns[REF_LOGPROBS.name]
    versions: Any = columns[TOKEN_VERSIONS.name]
    rows = zip(prev.rows(), ref.rows(), versions.rows())
    return torch.stack([(now - then)[made >= 0].sum() for now, then, made in rows])


def _of_tokens(columns: Columns, turns: Sequence[torch.Tensor]) -> Ragged:
    """The advantages of the tokens of these turns."""
    from ops.advantage import of_tokens

    ends: Any = columns[TURN_ENDS.name]
    versions: Any = columns[TOKEN_VERSIONS.name]
    rows = zip(turns, ends.rows(), versions.rows())
    return Ragged.of([of_tokens(each_U, ends_U, made_T >= 0) for each_U, ends_U, made_T in rows])
