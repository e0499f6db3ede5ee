"""Log-probabilities of given tokens, and entropy, if each rank of a group has the logits of a part of the vocabulary.

    logprobs_R, entropy_R = logprobs_and_entropy(logits_RV, ids_R, group=group, first=rank * share, temperature=0.7)

The logits are never gathered: ranks exchange a few numbers per row. On a GPU with Triton, one kernel per pass reads the
logits once (ops.vocab_kernel). Elsewhere one block of rows at a time is converted to float32, so half-precision logits
have no second copy in the forward pass, and only their gradient in the backward pass. Without a group, it computes on
one rank. Knows no model.

Legend: R rows, one per token; V this rank's part of the vocabulary, which starts at token `first`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ops.kernels import has_kernels

_CHUNK_ELEMENTS = 1 << 25  # maximum number of logits in float32 at a time: 128 MiB
OverRanks: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Sums: TypeAlias = tuple[torch.Tensor, torch.Tensor]
_NEVER = -1e4  # a logarithm whose exponential is 0 in every dtype


def logprobs_and_entropy(
    logits_RV: torch.Tensor,
    ids_R: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
    temperature: float = 1.0,
    reuse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(logits / temperature)[id] and the entropy of the softmax, both [R] in nat, equal on all ranks.

    Differentiable once in the logits; each rank gets the gradient of its own part. Half precision is reduced in float32
    and returns float32; other dtypes are kept. All ranks of the group must call it together; the backward pass does not
    communicate. With `reuse` it may overwrite the logits with their gradient, if nothing else needs them.
    """
    return _LogprobsAndEntropy.apply(logits_RV, ids_R, group, first, temperature, reuse)


class _LogprobsAndEntropy(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z) and h the entropy:

    d logprob / d z = [token is the id] - p;  d h / d z = -p (log p + h).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_RV: torch.Tensor,
        ids_R: torch.Tensor,
        group: dist.ProcessGroup | None,
        first: int,
        temperature: float,
        reuse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own_R = ids_R - first
        mine_R = (own_R >= 0) & (own_R < logits_RV.shape[1])

        def over_ranks(largest_R: torch.Tensor) -> torch.Tensor:
            if group is not None:
                dist.all_reduce(largest_R, op=dist.ReduceOp.MAX, group=group)
            return largest_R

        sums = _by_kernel if has_kernels(logits_RV) else _by_block
        largest_R, sums_3R = sums(logits_RV, own_R, over_ranks, temperature)
        sums_3R[2].masked_fill_(~mine_R, 0.0)  # another rank has the token
        if group is not None:
            dist.all_reduce(sums_3R, group=group)
        total_R, expected_R, chosen_R = sums_3R
        norm_R = total_R.log()
        entropy_R = norm_R - expected_R / total_R
        ctx.save_for_backward(logits_RV, own_R, mine_R, largest_R + norm_R, entropy_R)
        ctx.temperature, ctx.reuse = temperature, reuse
        ctx.set_materialize_grads(False)
        return chosen_R - norm_R, entropy_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_R: torch.Tensor | None, grad_entropy_R: torch.Tensor | None) -> tuple[Any, ...]:
        logits_RV, own_R, mine_R, norm_R, entropy_R = ctx.saved_tensors
        grad_R = torch.zeros_like(norm_R) if grad_R is None else grad_R
        if has_kernels(logits_RV):
            from ops.vocab_kernel import slopes_

            out_RV = logits_RV if ctx.reuse else logits_RV.clone()
            by_entropy_R = torch.zeros_like(norm_R) if grad_entropy_R is None else grad_entropy_R
            slopes_(out_RV, own_R, norm_R, entropy_R, grad_R, by_entropy_R, 1.0 / ctx.temperature)
            return out_RV, None, None, None, None, None
        out_RV = torch.empty_like(logits_RV)
        own_R = own_R.clamp(0, logits_RV.shape[1] - 1)
        for rows, wide_RV in _blocks(logits_RV, ctx.temperature):
            log_RV = wide_RV - norm_R[rows, None]
            slope_RV = log_RV.exp()
            if grad_entropy_R is None:
                slope_RV.mul_(-grad_R[rows, None])
            else:
                log_RV.clamp_(min=_NEVER).add_(entropy_R[rows, None])
                log_RV.mul_(grad_entropy_R[rows, None]).add_(grad_R[rows, None])
                slope_RV.mul_(log_RV.neg_())
            slope_RV.scatter_add_(-1, own_R[rows, None], (grad_R[rows] * mine_R[rows])[:, None])
            out_RV[rows] = slope_RV.div_(ctx.temperature)
        return out_RV, None, None, None, None, None


def _by_block(logits_RV: torch.Tensor, own_R: torch.Tensor, over_ranks: OverRanks, temperature: float) -> Sums:
    """Return the largest z of each row over all ranks, [R]; and [3, R] of this rank: the sums of w = exp(z - largest)
    and of w (z - largest), and z - largest of the token, any number if another rank has it."""
    largest_R = over_ranks(torch.cat([wide_RV.amax(-1) for _, wide_RV in _blocks(logits_RV, temperature)]))
    own_R = own_R.clamp(0, logits_RV.shape[1] - 1)
    parts = []
    for rows, wide_RV in _blocks(logits_RV, temperature):
        shifted_RV = wide_RV - largest_R[rows, None]
        chosen_R = shifted_RV.gather(-1, own_R[rows, None])[:, 0]
        shifted_RV.clamp_(min=_NEVER)  # an excluded token (-inf) adds 0, not 0 * -inf
        weight_RV = shifted_RV.exp()
        total_R = weight_RV.sum(-1)
        parts.append(torch.stack([total_R, weight_RV.mul_(shifted_RV).sum(-1), chosen_R]))
    return largest_R, torch.cat(parts, dim=1)


def _by_kernel(logits_RV: torch.Tensor, own_R: torch.Tensor, over_ranks: OverRanks, temperature: float) -> Sums:
    """Return what `_by_block` returns; the kernel's sums are relative to this rank's largest z."""
    from ops.vocab_kernel import sums

    own_largest_R, total_R, expected_R, chosen_R = sums(logits_RV, own_R, 1.0 / temperature)
    largest_R = over_ranks(own_largest_R.clone())
    by_R = (own_largest_R - largest_R).clamp(min=_NEVER)
    expected_R = by_R.exp() * (expected_R + by_R * total_R)
    return largest_R, torch.stack([by_R.exp() * total_R, expected_R, chosen_R - largest_R])


def _blocks(logits_RV: torch.Tensor, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices over the rows with their logits / temperature; at least one, even if there are no rows."""
    step = max(1, _CHUNK_ELEMENTS // max(1, logits_RV.shape[1]))
    for start in range(0, max(1, len(logits_RV)), step):
        rows = slice(start, start + step)
        block_RV = logits_RV[rows]
        wide_RV = block_RV.float() if block_RV.dtype in (torch.bfloat16, torch.float16) else block_RV
        yield rows, wide_RV / temperature if temperature != 1.0 else wide_RV
