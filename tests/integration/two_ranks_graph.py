"""The quickstart, as small as it gets, with two trainer ranks and a two-sided refit: every kind of socket is open."""

from __future__ import annotations

from dataclasses import replace

from graphs import quickstart
from pipeline import Graph, WorkerGroup
from stages import PrevLogprobs, Refit, Train

LEARNER = WorkerGroup("learner", backend="torch", workers=2, threads=1, cpus=0.25)


def graph(steps: int = 10_000) -> Graph:
    """GRPO on reversed digits."""
    made = quickstart.graph(
        steps=steps, prompts_per_step=4, samples_per_prompt=4, threads=1, warm_start_steps=0, evaluate_every=steps,
        refit_transport="gloo",
    )  # fmt: skip
    stages = [
        replace(stage, source=LEARNER)
        if isinstance(stage, Refit)
        else replace(stage, on=LEARNER)
        if isinstance(stage, PrevLogprobs | Train)
        else stage
        for stage in made.stages
    ]
    return replace(made, stages=tuple(stages))
