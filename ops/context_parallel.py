"""Values of all tokens from ranks that each computed some of them, differentiable.

    logprobs_R = whole(logprobs_of_mine, mine, size=R, group=context_parallel_group)

Every rank then computes the same loss from the same values, and the backward pass gives each rank the gradient of its
own tokens. Summed over the ranks, gradients of the weights equal those of one rank with all tokens. Knows no model.

Legend: R tokens; M tokens of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def whole(values_M: torch.Tensor, mine_M: torch.Tensor, *, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return [R], R = `size`, from the values of each rank at the indices `mine`; ranks share no index.

    All ranks of the group call it together; the backward pass does not communicate.
    """
    return _Whole.apply(values_M, mine_M, size, group)


class _Whole(torch.autograd.Function):
    """A sum in which every entry but one is 0, hence exact."""

    @staticmethod
    def forward(
        ctx: Any, values_M: torch.Tensor, mine_M: torch.Tensor, size: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(mine_M)
        made_R = values_M.new_zeros(size)
        made_R[mine_M] = values_M
        dist.all_reduce(made_R, group=group)
        return made_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_R: torch.Tensor) -> tuple[Any, ...]:
        (mine_M,) = ctx.saved_tensors
        return grad_R[mine_M], None, None, None
