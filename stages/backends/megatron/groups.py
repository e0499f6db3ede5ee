"""Maps the ranks of a worker group to Megatron-core's process groups. Knows processes, no model.

A single worker gets a world of size one, so that Megatron-core finds its groups there too.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from pipeline.declare.ranks import Layout, Ranks
from stages.backends.megatron.cpu import on_cpu
from stages.backends.megatron.names import Part


@dataclass(frozen=True, eq=False)
class Groups:
    """This rank's position and its process groups.

    `expert` is the number of data-parallel ranks that the experts are divided over.
    """

    ranks: Ranks
    expert: int
    device: torch.device
    process: ProcessGroupCollection

    @property
    def layout(self) -> Layout:
        """How the ranks divide the work."""
        return self.ranks.layout

    @property
    def last(self) -> int:
        """The rank with the logits of this rank's replica: the last stage at the same tensor-parallel position."""
        return dist.get_process_group_ranks(self.process.pp)[-1]

    @property
    def is_last(self) -> bool:
        """Whether this rank computes logits."""
        return self.last == self.ranks.rank

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks divide the sequence outside the matrix products. Not possible with gloo."""
        return self.layout.tensor > 1 and self.device.type == "cuda"

    def part(self, rank: int | None = None) -> Part:
        """The part of a model that a rank (default: this one) holds."""
        rank = self.ranks.rank if rank is None else rank
        inside = self.layout.tensor * self.layout.context
        return Part(
            tensor=rank % self.layout.tensor,
            tensors=self.layout.tensor,
            stage=rank // (inside * self.layout.data),
            stages=self.layout.pipeline,
            expert=self.layout.replica(rank) % self.expert,
            experts=self.expert,
        )

    def holder(self, *, tensor: int, stage: int, expert: int = 0) -> int:
        """The first rank that holds this part."""
        inside = self.layout.tensor * self.layout.context
        return stage * inside * self.layout.data + expert * inside + tensor

    def computing(self) -> AbstractContextManager[None]:
        """The context for calls of Megatron-core."""
        return nullcontext() if self.device.type == "cuda" else on_cpu()

    def from_last(self, values: torch.Tensor) -> torch.Tensor:
        """Broadcast the last stage's `values` to all stages of the replica."""
        if self.layout.pipeline > 1:
            dist.broadcast(values, src=self.last, group=self.process.pp)
        return values


def join(ranks: Ranks, expert: int, device: torch.device, seed: int) -> Groups:
    """Create Megatron-core's groups, which are global to the process. All ranks call it together, once."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    layout = ranks.layout
    computing = nullcontext() if device.type == "cuda" else on_cpu()
    with computing:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=expert,
            distributed_timeout_minutes=_timeout_minutes(device),
            create_gloo_process_groups=True,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=device.type == "cpu")
    return Groups(ranks, expert, device, ProcessGroupCollection.use_mpu_process_groups())


def _timeout_minutes(device: torch.device) -> int:
    """The timeout that the ranks agreed on when they met, rounded up."""
    world: Any = dist.group.WORLD
    return max(1, math.ceil(world._get_backend(device).options._timeout.total_seconds() / 60))
