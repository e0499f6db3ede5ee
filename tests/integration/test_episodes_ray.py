"""Episodes on Ray and TransferQueue: the bits of a run in this process."""

from __future__ import annotations

import torch

from tests.unit.environments import Echo
from tests.unit.test_episode import execute, published, run_graph

torch.set_num_threads(1)


def test_a_run_on_ray_is_that_of_one_process(tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor

    runs = [execute(tmp_path / "local", run_graph(Echo())), execute(tmp_path / "ray", run_graph(Echo()), RayExecutor())]
    assert published(runs[0]) == published(runs[1]) and len(published(runs[0])) == 3
