"""The advantage stage: whole groups in, advantages and metrics out."""

import cloudpickle
import pytest
import torch

from pipeline import Graph, Schedule, Stage, StageContext, Task, WorkerGroup
from stages.advantage import Advantage
from stages.prompts import Prompts
from stages.tasks import Generated

torch.set_num_threads(1)


class Maker(Stage):
    group_size = 4


def graph(*stages):
    return Graph(name="g", source=Prompts(Generated()), stages=stages, schedule=Schedule(steps=1))


def run(stage, rewards, group_size):
    context = StageContext(group=WorkerGroup("host"), rank=0, seed=0, group_size=group_size, run_dir=None, shared={})
    groups = tuple(range(len(rewards) // group_size))
    return stage.setup(context)({"reward": torch.tensor(rewards)}, Task(stage="advantage", step=0, groups=groups))


def test_advantages_and_metrics():
    out = run(Advantage(), [0.0, 1.0, 0.5, 0.5], 2)
    half = 0.5**0.5
    torch.testing.assert_close(out.columns["advantage"], torch.tensor([-half, half, 0, 0]), rtol=1e-5, atol=0)
    assert out.columns["advantage"].dtype == torch.float32
    assert out.metrics == {"zero_spread": 0.5, "abs_mean": pytest.approx(half / 2, rel=1e-5)}


def test_eps_is_added_to_the_standard_deviation():
    out = run(Advantage(eps=0.5), [0.0, 1.0], 2)
    torch.testing.assert_close(out.columns["advantage"], torch.tensor([-0.5, 0.5]) / (0.5**0.5 + 0.5))


def test_a_group_of_one_gives_zero_and_is_counted():
    out = run(Advantage(), [3.0, 4.0], 1)
    assert out.columns["advantage"].tolist() == [0.0, 0.0]
    assert out.metrics["zero_spread"] == 1.0


def test_a_group_does_not_depend_on_the_groups_beside_it():
    torch.manual_seed(0)
    rewards = torch.rand(24).tolist()
    together = run(Advantage(), rewards, 3).columns["advantage"]
    alone = [run(Advantage(), rewards[i : i + 3], 3).columns["advantage"] for i in range(0, 24, 3)]
    assert torch.equal(together, torch.cat(alone))


def test_description():
    stage = Advantage(on=WorkerGroup("cpu"))
    assert [field.name for field in stage.reads] == ["reward"]
    assert [field.name for field in stage.writes] == ["advantage"]
    assert (stage.name, stage.per, stage.groups()) == ("advantage", "group", (stage.on,))
    assert stage.location.file == __file__
    assert cloudpickle.loads(cloudpickle.dumps(stage)) == stage
    assert list(stage.check(graph(Maker(), stage))) == []


def test_problems():
    stage = Advantage("gae", eps=0)
    kind, eps = stage.check(graph(Maker(), stage))
    assert str(kind) == (
        f"{stage.location}: unknown kind of advantage 'gae'; known kinds are group_relative. "
        'Fix: write Advantage("group_relative")'
    )
    assert eps.what == "eps=0"
    (warning,) = Advantage().check(graph())
    assert warning.warning
    assert "one sample" in warning.what
