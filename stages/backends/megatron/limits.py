"""What the megatron backend asks of a worker group. Loads neither torch nor Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline import WorkerGroup
from pipeline.errors import Problem


def problems(group: WorkerGroup, where: str) -> Iterator[Problem]:
    """What keeps the group from training with Megatron-core."""
    has = f"worker group {group.name!r}"
    if group.gpus > 0 and group.gpus != group.workers:
        yield Problem(
            where=where,
            what=f"{has} has {group.gpus} GPUs for {group.workers} workers",
            why="a rank of Megatron-core computes on one GPU of its own",
            fix=f"gpus={group.workers}, or workers={group.gpus}",
        )
    if group.fully_sharded:
        yield Problem(
            where=where,
            what=f"{has} is fully_sharded",
            why="Megatron-core divides the optimizer over the data-parallel ranks by itself, and weights by tensor, "
            "pipeline and expert parallelism",
            fix="fully_sharded=False, and tensor_parallel or pipeline_parallel above 1 for what does not fit",
        )
    if group.context_parallel > 1:
        yield Problem(
            where=where,
            what=f"{has} has context_parallel={group.context_parallel}",
            why="Megatron-core divides a sequence over ranks by Transformer Engine's attention only, and this backend "
            "has its own, over whole sequences",
            fix="context_parallel=1; tensor_parallel divides the activations of a sequence too",
        )
