"""The quickstart, small enough for a step in a tenth of a second, with a reward in a process of its own."""

from __future__ import annotations

from dataclasses import replace

from graphs import quickstart
from pipeline import Graph, WorkerGroup
from stages import Reward

REWARD = WorkerGroup("reward", backend="python")


def graph(steps: int = 12, max_staleness: int = 0, checkpoint_every: int = 3) -> Graph:
    """GRPO on reversed digits."""
    made = quickstart.graph(
        steps=steps, prompts_per_step=4, samples_per_prompt=4, threads=1, warm_start_steps=0, evaluate_every=steps,
        max_staleness=max_staleness,
    )  # fmt: skip
    stages = tuple(replace(stage, on=REWARD) if isinstance(stage, Reward) else stage for stage in made.stages)
    schedule = replace(made.schedule, checkpoint_every=checkpoint_every, keep_checkpoints=2)
    return replace(made, stages=stages, schedule=schedule)
