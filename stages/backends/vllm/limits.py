"""What the vLLM backend asks of a worker group. Loads no vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline import WorkerGroup
from pipeline.errors import Problem


def problems(group: WorkerGroup, where: str) -> Iterator[Problem]:
    """What keeps the group from sampling with vLLM."""
    for name, kind in (
        ("pipeline_parallel", "one layer after the other on several workers"),
        ("context_parallel", "one sequence on several workers"),
        ("expert_parallel", "the experts of a mixture on several replicas"),
    ):
        if getattr(group, name) > 1:
            yield Problem(
                where=where,
                what=f"worker group {group.name!r} has {name}={getattr(group, name)}",
                why=f"the backend {group.backend!r} divides a model by tensor_parallel only, not {kind}",
                fix=f"{name}=1, and tensor_parallel for a model that is too large for one worker",
            )
    if group.fully_sharded:
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} is fully_sharded",
            why="that divides the state of an optimizer, and sampling has none",
            fix="fully_sharded=False, and tensor_parallel for a model that is too large for one worker",
        )
    if group.gpus not in (0, group.workers):
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} has {group.gpus} GPUs for {group.workers} workers",
            why=f"a worker of the backend {group.backend!r} is one GPU, or none of them has one",
            fix=f"gpus={group.workers}, or gpus=0 with the CPU build of vLLM",
        )
