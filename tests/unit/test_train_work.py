"""What a train task reports of its work: operations of all replicas, speed per rank."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline import Model, StageContext, WorkerGroup
from pipeline.declare.ranks import RankLayout, Ranks
from stages.train import Train, TrainRunner


class Backend:
    """2 TFLOP per batch, on GPUs of 10 TFLOP/s."""

    def learner(self, *_: Any) -> None:
        pass

    def flops(self, *_: Any, training: bool) -> float:
        return 2e12

    def peak_tflops(self) -> float:
        return 10.0


class Batch:
    prompt_ids = response_ids = None


@pytest.mark.parametrize("layout", [RankLayout(), RankLayout(tensor=2), RankLayout(context=2, pipeline=2)])
def test_ranks_that_share_a_model_share_its_operations(layout: RankLayout) -> None:
    stage = Train(Model("tiny"), on=WorkerGroup("learner", workers=layout.size), lr=1e-3)
    ranks = Ranks(layout)
    context = StageContext(group=stage.on, rank=0, seed=0, group_size=1, run_dir=None, shared={}, ranks=ranks)
    backend: Any = Backend()
    batch: Any = Batch()
    work = TrainRunner(stage, backend, context)._work(batch, None, taken_s=0.5)
    speed = 4.0 / layout.size
    assert work == {"flops": 2e12, "ranks": layout.size, "tflops_per_s": speed, "utilization": speed / 10.0}
