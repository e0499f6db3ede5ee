"""Maps the ranks of a worker group to Megatron-core's process groups. Knows processes, no model.

A single worker gets a world of size one, so that Megatron-core finds its groups there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from pipeline.declare.ranks import RankLayout, Ranks
from stages.backends.megatron.cpu import on_cpu
from stages.backends.megatron.parts import Part, stage_ranks


@dataclass(frozen=True, eq=False)
class Groups:
    """This rank's position and its process groups.

    `expert` is the number of ranks that the experts are divided over, and `expert_tensor` that of ranks that divide
    each expert.
    """

    ranks: Ranks
    expert: int
    expert_tensor: int
    device: torch.device
    process: ProcessGroupCollection

    @property
    def layout(self) -> RankLayout:
        """How the ranks divide the work."""
        return self.ranks.layout

    @property
    def last(self) -> int:
        """The rank with the logits of this rank's replica: the last stage at the same tensor and context position."""
        return dist.get_process_group_ranks(self.process.pp)[-1]

    @property
    def is_last(self) -> bool:
        """Whether this rank computes logits."""
        return self.last == self.ranks.rank

    def part(self, rank: int | None = None) -> Part:
        """The part of a model that a rank (default: this one) holds."""
        rank = self.ranks.rank if rank is None else rank
        return Part.of(rank, self.layout, self.expert, self.expert_tensor)

    def holders(self, stage: int, *, experts: bool) -> Iterator[tuple[int, ...]]:
        """Sets of ranks of a pipeline stage. Those of one set divide each parameter: of the same experts, or of
        everything else. Each set is the first that holds these parameters."""
        first, size = stage * stage_ranks(self.layout), self.expert_tensor if experts else self.layout.tensor
        for start in range(first, first + size * (self.expert if experts else 1), size):
            yield tuple(range(start, start + size))

    def is_first(self, *, experts: bool) -> bool:
        """Whether no lower rank holds the same part: of the experts, or of everything else."""
        sets = self.holders(self.part().stage, experts=experts)
        return any(self.ranks.rank in ranks for ranks in sets)

    def computing(self) -> AbstractContextManager[None]:
        """The context for calls of Megatron-core."""
        return nullcontext() if self.device.type == "cuda" else on_cpu()

    def from_last(self, values: torch.Tensor) -> torch.Tensor:
        """Broadcast the last stage's `values` to all stages of the replica."""
        if self.layout.pipeline > 1:
            dist.broadcast(values, src=self.last, group=self.process.pp)
        return values


def join(ranks: Ranks, expert: int, device: torch.device, seed: int, expert_tensor: int | None = None) -> Groups:
    """Create Megatron-core's groups, which are global to the process. All ranks call it together, once.

    `expert_tensor` None divides each expert like everything else, over the tensor-parallel ranks.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    layout = ranks.layout
    expert_tensor = expert_tensor or layout.tensor
    computing = nullcontext() if device.type == "cuda" else on_cpu()
    with computing:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
            distributed_timeout_minutes=_timeout_minutes(device),
            create_gloo_process_groups=True,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=device.type == "cpu")
    return Groups(ranks, expert, expert_tensor, device, ProcessGroupCollection.use_mpu_process_groups())


def _timeout_minutes(device: torch.device) -> int:
    """The timeout that the ranks agreed on when they met, rounded up."""
    world: Any = dist.group.WORLD
    return max(1, math.ceil(world._get_backend(device).options._timeout.total_seconds() / 60))
