"""The megatron backend's requirements for a worker group. Loads neither torch nor Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline import WorkerGroup
from pipeline.errors import Problem, counted
from stages.backends import asked

ENGINE = "transformer_engine"


def problems(group: WorkerGroup, where: str) -> Iterator[Problem]:
    """Reasons why the group cannot train with Megatron-core."""
    has = f"worker group {group.name!r}"
    if group.gpus > 0 and group.gpus != group.workers:
        yield Problem(
            where=where,
            what=f"{has} has {counted(group.gpus, 'GPU')} for {counted(group.workers, 'worker')}",
            why="each Megatron-core rank needs a GPU of its own",
            fix=f"gpus={group.workers}, or workers={group.gpus}",
        )
    if group.fully_sharded:
        yield Problem(
            where=where,
            what=f"{has} is fully_sharded",
            why="Megatron-core itself shards the optimizer over data-parallel ranks, and weights by tensor, pipeline "
            "and expert parallelism",
            fix="fully_sharded=False, and tensor_parallel or pipeline_parallel above 1 if the model does not fit",
        )
    if group.context_parallel > 1:
        yield from _context(group, where)


def _context(group: WorkerGroup, where: str) -> Iterator[Problem]:
    """Reasons why the group cannot divide the samples of a row."""
    has = f"worker group {group.name!r} has context_parallel={group.context_parallel}"
    why = "Megatron-core divides samples over ranks only with Transformer Engine's attention"
    otherwise = "context_parallel=1; tensor_parallel also divides the activations of a sample"
    if not group.gpus:
        yield Problem(where=where, what=f"{has} and no GPUs", why=f"{why}, which needs GPUs", fix=otherwise)
    elif asked((ENGINE,), group).missing:
        what = f"{has}, and its workers do not find the package {ENGINE!r}"
        yield Problem(where=where, what=what, why=why, fix=f"pip install 'transformer-engine[pytorch]', or {otherwise}")
