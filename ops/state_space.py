"""Mamba-2's scan and the convolution before it, in plain torch: chunks of positions at once (SSD, arXiv 2405.21060).

    mixed = convolved(inputs, weight, bias, sample)
    output = scanned(x, step, decay, b, c, sample, chunk=64)

With `sample`, positions of a row belong to several samples, one after the other: state and convolution restart where
it changes. Knows tensors only.

Legend: N rows, S positions, D channels, K positions of the convolution, H heads, P channels of a head, G groups of
heads that share B and C, Z size of a state, C chunks, L and M positions of a chunk.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def convolved(
    inputs_NSD: torch.Tensor, weight_DK: torch.Tensor, bias_D: torch.Tensor | None, sample_S: torch.Tensor
) -> torch.Tensor:
    """Causal convolution of each channel, [N, S, D]. The last entry of a channel's weight is the position's own."""
    size, kernel = inputs_NSD.shape[1], weight_DK.shape[1]
    made_NSD = inputs_NSD * weight_DK[:, -1]
    for back in range(1, min(kernel, size)):
        same_S1 = (sample_S[back:] == sample_S[:-back])[:, None]
        earlier_NSD = inputs_NSD[:, :-back] * same_S1 * weight_DK[:, -1 - back]
        made_NSD = made_NSD + pad(earlier_NSD, (0, 0, back, 0))
    return made_NSD if bias_D is None else made_NSD + bias_D


def scanned(
    x_NSHP: torch.Tensor,
    step_NSH: torch.Tensor,
    decay_H: torch.Tensor,
    b_NSGZ: torch.Tensor,
    c_NSGZ: torch.Tensor,
    sample_S: torch.Tensor,
    *,
    chunk: int,
) -> torch.Tensor:
    """The outputs, [N, S, H, P], of a state h that each position changes: h = exp(step decay) h + step x b, output h c.

    `step` is positive and `decay` negative. A state starts at 0.
    """
    size, heads, groups = x_NSHP.shape[1], x_NSHP.shape[2], b_NSGZ.shape[2]
    spare = -size % chunk
    sample_S = pad(sample_S, (0, spare), value=-1)
    x, step, b, c = (pad(each, (0, 0) * (each.dim() - 2) + (0, spare)) for each in (x_NSHP, step_NSH, b_NSGZ, c_NSGZ))
    x, step, b, c = (each.unflatten(1, (-1, chunk)) for each in (x, step, b, c))
    sample_CL = sample_S.unflatten(0, (-1, chunk))
    b, c = (each.repeat_interleave(heads // groups, dim=3) for each in (b, c))
    x = x * step[..., None]
    log_NCLH = (step * decay_H).cumsum(2)  # of the decay from the start of the chunk
    # Within a chunk, each position sees those before it of its own sample.
    seen_CLM = (sample_CL[:, :, None] == sample_CL[:, None, :]).tril()
    log_NCHLM = log_NCLH.transpose(2, 3)[..., :, None] - log_NCLH.transpose(2, 3)[..., None, :]
    weight_NCHLM = log_NCHLM.masked_fill(~seen_CLM[:, None], float("-inf")).exp()
    weight_NCHLM = weight_NCHLM * torch.einsum("nclhz,ncmhz->nchlm", c, b)
    made = torch.einsum("nchlm,ncmhp->nclhp", weight_NCHLM, x)
    # From chunk to chunk, the state of the sample that has the last position passes on.
    last_CL = sample_CL == sample_CL[:, -1:]
    left_NCLH = (log_NCLH[:, :, -1:] - log_NCLH).masked_fill(~last_CL[..., None], float("-inf")).exp()
    own_NCHPZ = torch.einsum("nclh,nclhp,nclhz->nchpz", left_NCLH, x, b)
    before_C = torch.cat([sample_CL[:1, 0], sample_CL[:-1, -1]])  # the sample that a chunk's first state is of
    passes_C = before_C == sample_CL[:, -1]
    state_NHPZ, states = torch.zeros_like(own_NCHPZ[:, 0]), []
    for i in range(own_NCHPZ.shape[1]):
        states.append(state_NHPZ)
        kept_NH = log_NCLH[:, i, -1].exp() * passes_C[i]
        state_NHPZ = kept_NH[..., None, None] * state_NHPZ + own_NCHPZ[:, i]
    entered_NCLH = log_NCLH.exp() * (sample_CL == before_C[:, None])[..., None]
    made = made + torch.einsum("nclh,nclhz,nchpz->nclhp", entered_NCLH, c, torch.stack(states, dim=1))
    return made.flatten(1, 2)[:, :size]
