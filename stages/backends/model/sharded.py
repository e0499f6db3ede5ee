"""Networks whose weights are divided over data-parallel ranks (FSDP2), and their tensors put together again.

Every rank builds the same network and keeps its share; a layer's weights are gathered when it computes. Knows modules
and ranks; it does not know optimizers.
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
    """Divide the network in place: a unit a decoder layer, and one for the rest. It computes in `compute`.

    Gradients are added up over ranks, not averaged, in float32: the loss is normalised over all ranks already.
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
    """Whether its weights lie on several ranks."""
    return isinstance(network, FSDPModule)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank; all ranks call it, in the same order. A tensor that is whole stays as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """`value`, which every rank has whole, divided and placed as `held` is; nothing is sent."""
    value = value.to(held.device, held.dtype)
    if isinstance(held, DTensor):
        return distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None)
    return value
