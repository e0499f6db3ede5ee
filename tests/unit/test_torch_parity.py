"""The stages in a plain loop give the same losses and weights as the handwritten loop, bit for bit."""

from typing import Any

import pytest
import torch

from graphs.quickstart import graph
from pipeline import Graph, StageContext, Task
from stages.backends import engine
from tests.integration import handwritten
from tests.integration.same_settings import reverse_settings
from tests.unit.streams import collected, whole

torch.set_num_threads(1)
STEPS, PROMPTS, SAMPLES, LR, WARM_STEPS = 20, 8, 8, 2e-3, 20


class Meeting:
    """Fake of both sides of a transfer, used one after the other."""

    side, is_near = "source", True
    payload: Any = None

    def offer(self, payload: Any) -> None:
        self.payloads, self.side = [payload], "target"

    def take(self) -> list[Any]:
        return self.payloads


def run_stages(described: Graph) -> tuple[list[float], dict[str, torch.Tensor]]:
    seed, steps = described.schedule.seed, described.schedule.steps
    contexts = {
        group.name: StageContext(
            group=group, rank=0, seed=seed, group_size=described.group_size, run_dir=None, shared={}, steps=steps
        )
        for stage in described.all_stages()
        for group in stage.groups() or (described.host,)
    }
    stages = {stage.name: stage for stage in described.all_stages()}
    runners = {
        name: [stage.setup(contexts[group.name]) for group in stage.groups() or (described.host,)]
        for name, stage in stages.items()
    }
    losses = []
    version = 0
    for step in range(-1, steps):
        groups = tuple(range(step * described.batch, (step + 1) * described.batch))
        columns: dict[str, Any] = {}
        for name in ("prompts", "rollout", "reward", "prev_logprobs", "advantage", "train") if step >= 0 else ():
            task = Task(stage=name, step=step, groups=groups, version=version)
            given = {field.name: columns[field.name] for field in stages[name].reads}
            result = runners[name][0](given, task)
            columns |= whole(collected(result)) if stages[name].shape == "stream" else result.columns
            if name == "train":
                losses.append(result.metrics["loss"])
        meeting, task = Meeting(), Task(stage="refit", step=step, version=version)
        runners["refit"][0](meeting, task)
        version, _ = runners["refit"][1](meeting, task).weights
    assert version == steps
    return losses, engine(contexts["sampler"]).served_weights(stages["rollout"].model)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_stages_equal_the_handwritten_loop_bit_for_bit(minibatches: int) -> None:
    expected_losses, expected_weights = handwritten.run(
        reverse_settings(
            steps=STEPS,
            prompts=PROMPTS,
            samples=SAMPLES,
            minibatches=minibatches,
            lr=LR,
            warm_steps=WARM_STEPS,
            seed=0,
        )
    )
    losses, weights = run_stages(
        graph(
            task="reverse",
            steps=STEPS,
            seed=0,
            prompts_per_step=PROMPTS,
            samples_per_prompt=SAMPLES,
            lr=LR,
            minibatches=minibatches,
            warm_start_steps=WARM_STEPS,
            warm_start_until=1.0,
            threads=1,
        )
    )
    assert losses == expected_losses
    assert len(set(losses)) > STEPS // 2
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
