"""Shards a network's weights over data-parallel ranks (FSDP2), and reassembles them.

Every rank builds the same network and keeps its shard; a layer's weights are gathered when it computes. Knows modules
and ranks, not optimizers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from pipeline.declare.ranks import Ranks


def divide(network: PreTrainedModel, ranks: Ranks, compute: torch.dtype) -> None:
    """Shard the network in place: one unit per decoder layer, and one for the rest. It computes in `compute`.

    Gradients are summed over ranks in float32, not averaged: the loss is already normalized over all ranks.
    """
    mesh = init_device_mesh(network.device.type, (ranks.layout.data,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    layers = set(network._no_split_modules or ())
    for module in [*(m for m in network.modules() if type(m).__name__ in layers), network]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            module.set_gradient_divide_factor(1.0)


def is_divided(network: nn.Module) -> bool:
    """Whether its weights are sharded over ranks."""
    return isinstance(network, FSDPModule)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank; all ranks call it in the same order. An unsharded tensor is returned as is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Shard `value`, which every rank has in full, the way `held` is sharded; no communication."""
    value = value.to(held.device, held.dtype)
    if isinstance(held, DTensor):
        return distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None)
    return value
