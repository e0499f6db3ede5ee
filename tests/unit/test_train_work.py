"""What a train task reports of its work: operations of all replicas without spared prompts, speed per rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import Model, StageContext, WorkerGroup
from pipeline.declare.ranks import RankLayout, Ranks
from pipeline.declare.sharding import Microbatch, Shard, Update
from stages.train import Train, TrainRunner


class Backend:
    """2 TFLOP per batch that computes a prompt of 7 tokens once for two samples, on GPUs of 10 TFLOP/s."""

    def learner(self, *_: Any) -> None:
        pass

    def flops(self, *_: Any, training: bool, spared: list[int]) -> float:
        return 2e12 if spared == [7] else 3e12

    def peak_tflops(self) -> float:
        return 10.0


class Batch:
    prompt_ids, response_ids = SimpleNamespace(lengths=(7, 7)), None


SHARD = Shard(0, 1, (0, 1), (Update((Microbatch((0, 1), 7, 2, shared=(2,)),), 4, 2),), True)


@pytest.mark.parametrize("layout", [RankLayout(), RankLayout(tensor=2), RankLayout(context=2, pipeline=2)])
def test_ranks_that_share_a_model_share_its_operations(layout: RankLayout) -> None:
    stage = Train(Model("tiny"), on=WorkerGroup("learner", workers=layout.size), lr=1e-3)
    ranks = Ranks(layout)
    context = StageContext(group=stage.on, rank=0, seed=0, group_size=1, run_dir=None, shared={}, ranks=ranks)
    backend: Any = Backend()
    batch: Any = Batch()
    work = TrainRunner(stage, backend, context)._work(batch, SHARD, taken_s=0.5)
    speed = 4.0 / layout.size
    assert work == {"flops": 2e12, "ranks": layout.size, "tflops_per_s": speed, "utilization": speed / 10.0}
