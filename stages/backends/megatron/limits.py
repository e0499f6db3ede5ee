"""The megatron backend's requirements for a worker group. Loads neither torch nor Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline import WorkerGroup
from pipeline.declare.ranks import RankLayout
from pipeline.errors import Problem, StageError, counted
from stages.backends import asked
from stages.backends.megatron.division import division_problems
from stages.backends.model.families import decoder_of

ENGINE = "transformer_engine"
UNSIZED: Mapping[str, Any] = {  # what no division depends on, where a config leaves it to its family
    "rms_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-5,
    "chunk_size": 128,
    "hidden_act": "silu",
    "vocab_size": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


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


def fits(group: WorkerGroup, config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Reasons why the group cannot build or divide a model with this config."""
    expert_tensor = group.expert_tensor_parallel or group.tensor_parallel
    try:
        layout = RankLayout.of(group)
        decoder = decoder_of({**UNSIZED, **config}, where)
        yield from list(division_problems(decoder, layout, group.expert_parallel, expert_tensor, where))
    except StageError as error:
        yield from error.problems
    except (KeyError, TypeError, ValueError, ArithmeticError):  # a wrong config is reported when the model is built
        return


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
