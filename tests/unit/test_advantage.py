"""Advantages: the formulas against hand-computed numbers, and the stage that applies them."""

import math

import cloudpickle
import pytest
import torch

from ops.advantage import group_relative, leave_one_out, mean_centred, zero_spread_groups
from pipeline import Graph, Schedule, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Ragged
from stages.advantage import KINDS, Advantage
from stages.prompts import Prompts
from stages.tasks import Generated

torch.set_num_threads(1)


class Maker(Stage):
    group_size = 4

    def setup(self, context):
        return lambda columns, task: {}


def graph(*stages):
    return Graph(name="g", source=Prompts(Generated()), stages=stages, schedule=Schedule(steps=1))


def run(stage, rewards, group_size, **columns):
    context = StageContext(group=WorkerGroup("host"), rank=0, seed=0, group_size=group_size, run_dir=None, shared={})
    groups = tuple(range(len(rewards) // group_size))
    given = {"reward": torch.tensor(rewards), **columns}
    if "prev_logprobs" in given:  # the policy drew all tokens, unless said otherwise
        lengths = given["prev_logprobs"].lengths
        given.setdefault("token_versions", Ragged(torch.zeros(sum(lengths), dtype=torch.int32), lengths))
    return stage.setup(context)(given, Task(stage="advantage", step=0, groups=groups))


def of_turns(rewards, ends, drawn):
    """Return the columns of episodes: rows of turn rewards, of turn ends, and of ones for tokens that were drawn."""
    return {
        "turn_rewards": Ragged.of([torch.tensor(row) for row in rewards]),
        "turn_ends": Ragged.of([torch.tensor(row) for row in ends]),
        "token_versions": Ragged.of([torch.tensor(row, dtype=torch.int32) - 1 for row in drawn]),
    }


def test_advantages_and_metrics():
    out = run(Advantage(), [0.0, 1.0, 0.5, 0.5], 2)
    half = 0.5**0.5
    torch.testing.assert_close(out.columns["advantage"], torch.tensor([-half, half, 0, 0]), rtol=1e-5, atol=0)
    assert out.columns["advantage"].dtype == torch.float32
    assert out.metrics == {"zero_spread": 0.5, "abs_mean": pytest.approx(half / 2, rel=1e-5)}


def test_eps_is_added_to_the_standard_deviation():
    out = run(Advantage(eps=0.5), [0.0, 1.0], 2)
    torch.testing.assert_close(out.columns["advantage"], torch.tensor([-0.5, 0.5]) / (0.5**0.5 + 0.5))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("group_relative", [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        ("rloo", [-3.0, 0.0, 3.0, 0.0, 0.0, 0.0]),
        ("dr_grpo", [-2.0, 0.0, 2.0, 0.0, 0.0, 0.0]),
        ("reward", [1.0, 3.0, 5.0, 0.1, 0.1, 0.1]),
    ],
)
def test_kinds(kind, expected):
    out = run(Advantage(kind), [1.0, 3.0, 5.0, 0.1, 0.1, 0.1], 3)
    torch.testing.assert_close(out.columns["advantage"], torch.tensor(expected), rtol=1e-6, atol=0)
    assert out.columns["advantage"].dtype == torch.float32
    assert out.metrics["zero_spread"] == 0.5


def test_kinds_are_all_tried():
    assert KINDS == ("group_relative", "rloo", "dr_grpo", "reward", "turn")


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    rewards = [0.3, -1.0, 2.5, 0.7]
    found = leave_one_out(torch.tensor(rewards, dtype=torch.float64), 4)
    others = [rewards[:i] + rewards[i + 1 :] for i in range(4)]
    expected = [reward - sum(rest) / 3 for reward, rest in zip(rewards, others)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_group_of_one_gives_zero_and_is_counted(kind):
    out = run(Advantage(kind), [3.0, 4.0], 1)
    assert out.columns["advantage"].tolist() == [0.0, 0.0]
    assert out.metrics["zero_spread"] == 1.0


@pytest.mark.parametrize("formula", [group_relative, leave_one_out, mean_centred])
def test_equal_rewards_give_exactly_zero(formula):
    equal = torch.full((7,), 0.1)
    assert (equal - equal.mean()).any(), "their mean, rounded, is another number"
    assert formula(equal, 7).tolist() == [0.0] * 7
    assert formula(torch.zeros(0), 7).tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_does_not_depend_on_the_groups_beside_it(kind):
    torch.manual_seed(0)
    rewards = torch.rand(24).tolist()
    lengths = torch.randint(1, 40, (24,)).tolist()
    prev, ref = (Ragged(-torch.rand(sum(lengths)), tuple(lengths)) for _ in range(2))

    def advantages(first, last):
        rows = {
            name: Ragged.of(column.rows()[first:last])
            for name, column in (("prev_logprobs", prev), ("ref_logprobs", ref))
        }
        if kind == "turn":
            lengths = rows["prev_logprobs"].lengths
            turns = [[0.5 * i] * (1 + i % 3) for i in range(first, last)]
            rows |= of_turns(turns, [[n] * len(row) for n, row in zip(lengths, turns)], [[1] * n for n in lengths])
        made = run(Advantage(kind, kl=0.1), rewards[first:last], 3, **rows).columns
        return made["advantage"] if kind != "turn" else made["token_advantages"].values

    assert torch.equal(advantages(0, 24), torch.cat([advantages(i, i + 3) for i in range(0, 24, 3)]))


def test_the_divergence_is_subtracted_from_the_reward():
    prev = Ragged(torch.tensor([-1.0, -2.0, -0.5, -1.0]), (3, 1))
    ref = Ragged(torch.tensor([-2.0, -2.5, -1.0, -0.5]), (3, 1))
    out = run(Advantage("reward", kl=0.5), [1.0, 1.0], 2, prev_logprobs=prev, ref_logprobs=ref)
    assert out.columns["advantage"].tolist() == [1.0 - 0.5 * 2.0, 1.0 + 0.5 * 0.5]
    assert out.metrics == {"kl_in_reward": 0.75, "zero_spread": 0.0, "abs_mean": 0.625}


def test_the_divergence_is_that_of_drawn_tokens():
    prev, ref = Ragged(torch.tensor([-1.0, -9.0, -2.0]), (3,)), Ragged(torch.tensor([-2.0, -1.0, -2.5]), (3,))
    versions = Ragged(torch.tensor([4, -1, 5], dtype=torch.int32), (3,))
    out = run(Advantage("reward", kl=1.0), [1.0], 1, prev_logprobs=prev, ref_logprobs=ref, token_versions=versions)
    assert out.columns["advantage"].tolist() == [1.0 - 1.5] and out.metrics["kl_in_reward"] == 1.5


def test_advantages_of_turns():
    """Of three turns with the rewards 1, 2 + 1 and 2; the discount halves the second one for the first turn."""
    columns = of_turns([[1.0, 2.0], [2.0]], [[2, 5], [1]], [[1, 1, 0, 1, 1], [1, 0]])
    out = run(Advantage("turn", discount=0.5), [1.0, 0.0], 2, **columns)
    found = out.columns["token_advantages"]
    assert list(out.columns) == ["token_advantages"] and found.values.dtype == torch.float32
    expected = [-1.0 + 0.5, -1.0 + 0.5, 0.0, 1.0, 1.0, 0.0, 0.0]
    torch.testing.assert_close(found.values, torch.tensor(expected), rtol=1e-5, atol=0)
    assert found.lengths == (5, 2)
    assert out.metrics == {"zero_spread": 0.0, "abs_mean": pytest.approx(0.5, rel=1e-5)}
    equal = run(Advantage("turn"), [0.1, 0.1] * 2, 2, **of_turns([[0.2], [0.2]] * 2, [[1]] * 4, [[1]] * 4))
    assert equal.columns["token_advantages"].values.tolist() == [0.0] * 4
    assert equal.metrics == {"zero_spread": 1.0, "abs_mean": 0.0}


def test_the_divergence_reads_both_logprobs():
    assert [field.name for field in Advantage(kl=0.1).reads] == [
        "reward", "prev_logprobs", "ref_logprobs", "token_versions",
    ]  # fmt: skip
    assert [field.name for field in Advantage().reads] == ["reward"]
    turns = ["reward", "turn_rewards", "turn_ends", "token_versions"]
    assert [field.name for field in Advantage("turn").reads] == turns
    assert [field.name for field in Advantage("turn", kl=0.1).reads] == [*turns, "prev_logprobs", "ref_logprobs"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: leave_one_out(torch.zeros(5), 2), "not whole groups of 2"),
        (lambda: mean_centred(torch.zeros(4), 0), "not whole groups of 0"),
        (lambda: group_relative(torch.zeros(2, 2), 2), "not whole groups of 2"),
        (lambda: leave_one_out(torch.zeros(4, dtype=torch.int64), 2), "torch.int64, not floating-point"),
        (lambda: zero_spread_groups(torch.zeros(3), 2), "not whole groups of 2"),
    ],
)
def test_bad_rewards_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_description():
    stage = Advantage(on=WorkerGroup("cpu"))
    assert [field.name for field in stage.reads] == ["reward"]
    assert [field.name for field in stage.writes] == ["advantage"]
    assert (stage.name, stage.per, stage.groups()) == ("advantage", "group", (stage.on,))
    assert stage.location.file == __file__
    assert cloudpickle.loads(cloudpickle.dumps(stage)) == stage
    assert list(stage.check(graph(Maker(), stage))) == []


def test_problems():
    stage = Advantage("gae", eps=0, kl=-1)
    kind, eps, kl = stage.check(graph(Maker(), stage))
    assert str(kind) == (
        f"{stage.location}: unknown kind of advantage 'gae'; known kinds are group_relative, rloo, dr_grpo, reward, "
        'turn. Fix: write Advantage("group_relative")'
    )
    assert eps.what == "eps=0"
    assert str(kl).endswith("kl=-1; the KL weight must be a number, 0 (none) or more. Fix: write kl=0.0")
    (unused,) = Advantage("rloo", discount=0.9).check(graph(Maker()))
    assert str(unused).endswith(
        "Advantage('rloo') has discount=0.9; a discount is that of later turns. "
        'Fix: write Advantage("turn", discount=0.9)'
    )
    for bad in ("0.1", None, True, 1.5, -0.1, math.nan):
        assert [problem.what for problem in Advantage("turn", discount=bad).check(graph())] == [f"discount={bad!r}"]
    for bad in ("0.1", None, True, math.inf, math.nan):
        assert [problem.what for problem in Advantage(kl=bad).check(graph(Maker()))] == [f"kl={bad!r}"]
    (warning,) = Advantage("rloo").check(graph())
    assert warning.warning
    assert "one sample" in warning.what
    assert list(Advantage("reward").check(graph())) == []
