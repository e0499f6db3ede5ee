"""Two Triton kernels that choose tokens by the rule of stages.backends.choose, without truncation.

The first reads the logits once: the largest of each block of a row, and the sum of exp(z - largest). The second finds
the block in which the cumulative weight exceeds the random number's share of the total, and the token within it. Sums
over blocks and within one are float64.

Legend: B rows, V vocabulary, K blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

AT_ONCE = 4096  # logits of a block


@triton.jit
def _weigh(logits, stride, largest, total, blocks, size, scale, AT_ONCE: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = block * AT_ONCE + tl.arange(0, AT_ONCE)
    value = tl.load(logits + row * stride + lane, mask=lane < size, other=float("-inf")).to(tl.float32) * scale
    top = tl.max(value, 0)
    weight = tl.where(value == float("-inf"), 0.0, tl.exp(value - top))
    tl.store(largest + row * blocks + block, top)
    tl.store(total + row * blocks + block, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def _pick(
    logits, stride, largest, total, uniform, tokens, logprobs, blocks, size, scale,
    BLOCKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCKS)
    tops = tl.load(largest + row * blocks + each, mask=each < blocks, other=float("-inf")).to(tl.float64)
    top = tl.max(tops, 0)
    sums = tl.load(total + row * blocks + each, mask=each < blocks, other=0.0)
    sums = tl.where(sums > 0.0, sums * tl.exp(tops - top), 0.0)
    upto = tl.cumsum(sums, 0)
    whole = tl.sum(sums, 0)
    target = tl.load(uniform + row) * whole
    held = sums > 0.0
    last = tl.max(tl.where(held, each, 0), 0)
    block = tl.minimum(tl.min(tl.where(held & (upto > target), each, BLOCKS), 0), last)
    before = tl.sum(tl.where(each < block, sums, 0.0), 0)
    lane = block * AT_ONCE + tl.arange(0, AT_ONCE)
    value = tl.load(logits + row * stride + lane, mask=lane < size, other=float("-inf")).to(tl.float32) * scale
    weight = tl.where(value == float("-inf"), 0.0, tl.exp(value.to(tl.float64) - top))
    within = tl.cumsum(weight, 0)
    live = weight > 0.0
    furthest = tl.max(tl.where(live, lane, 0), 0)
    token = tl.minimum(tl.min(tl.where(live & (within > target - before), lane, size), 0), furthest)
    chosen = tl.sum(tl.where(lane == token, value, 0.0).to(tl.float64), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, (chosen - top - tl.log(whole)).to(tl.float32))


def choose_whole(
    logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token per row, int64, and its logprob under softmax(logits / temperature), float32. `uniform_B` is
    float64 in (0, 1); each row of the logits is contiguous. A logit of -inf excludes a token."""
    (rows, size), device = logits_BV.shape, logits_BV.device
    blocks = triton.cdiv(size, AT_ONCE)
    largest = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    total = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        given = (logits_BV, logits_BV.stride(0), largest, total)
        scale = 1.0 / temperature
        _weigh[(rows, blocks)](*given, blocks, size, scale, AT_ONCE=AT_ONCE, num_warps=8)
        _pick[(rows,)](
            *given, uniform_B, tokens, logprobs, blocks, size, scale,
            BLOCKS=triton.next_power_of_2(blocks), AT_ONCE=AT_ONCE, num_warps=8,
        )  # fmt: skip
    return tokens, logprobs
