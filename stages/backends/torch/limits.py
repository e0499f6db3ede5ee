"""The torch backend's requirements for a worker group. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline import WorkerGroup
from pipeline.errors import Problem, counted


def problems(group: WorkerGroup, where: str) -> Iterator[Problem]:
    """Reasons why the group cannot use the torch backend."""
    if group.model_parallel > 1:
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} divides a model over {group.model_parallel} workers",
            why=f"a worker of backend {group.backend!r} holds a whole model, or a share of each layer (fully_sharded)",
            fix="tensor_parallel=1, context_parallel=1, pipeline_parallel=1",
        )
    if group.expert_parallel > 1:
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} divides experts over {group.expert_parallel} workers",
            why=f"a worker of backend {group.backend!r} holds all experts, or a share of each layer (fully_sharded)",
            fix="expert_parallel=1",
        )
    if group.fully_sharded and group.data_parallel < 2:
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} is fully_sharded and has {group.workers} worker",
            why="weights are sharded over data-parallel workers",
            fix="workers=2 or more, or fully_sharded=False",
        )
    if group.fully_sharded and group.colocated is not None:
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} is fully_sharded and colocated",
            why="sharded optimizer state cannot be moved to the host",
            fix="fully_sharded=False, or GPUs of its own",
        )
    if group.gpus > group.workers:
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} has {counted(group.gpus, 'GPU')} for {counted(group.workers, 'worker')}",
            why=f"a worker of the backend {group.backend!r} computes on one GPU",
            fix=f"gpus={group.workers}",
        )
