"""Logits and logprobs of given responses. Knows a network and token ids; it does not know what they are for.

Legend: N samples, P longest prompt, T longest response, S = P + T - 1, V vocabulary.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ops.logprobs import selected_logprobs
from pipeline.columns import Ragged
from stages.backends import cut
from stages.backends.torch.padding import pad_left, pad_right, unpad_right


def response_logits(
    network: PreTrainedModel, prompt_ids: Ragged, response_ids: Ragged, *, temperature: float, pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits / temperature [N, T, V] that predict the response tokens, their ids [N, T], and which are real [N, T].

    Only the logits of response positions are computed. Padding on the left of a prompt is masked; padding on the right
    of a response needs no mask, because attention is causal.
    """
    device = network.device
    prompts_NP = pad_left(prompt_ids, pad).to(device)
    ids_NT = pad_right(response_ids, pad).to(device)
    P, T = prompts_NP.shape[1], ids_NT.shape[1]
    inputs_NS = torch.cat([prompts_NP, ids_NT[:, :-1]], dim=1)
    mask_NS = positions_NS = None
    if min(prompt_ids.lengths) < P:
        left_N1 = torch.tensor([P - length for length in prompt_ids.lengths], device=device)[:, None]
        mask_NS = (torch.arange(P + T - 1, device=device) >= left_N1).long()
        positions_NS = (mask_NS.cumsum(-1) - 1).clamp(min=0)
    logits_NTV = network(
        input_ids=inputs_NS, attention_mask=mask_NS, position_ids=positions_NS, use_cache=False, logits_to_keep=T
    ).logits
    if temperature != 1.0:
        logits_NTV = logits_NTV.float() / temperature
    real_NT = torch.arange(T, device=device) < torch.tensor(response_ids.lengths, device=device)[:, None]
    return logits_NTV, ids_NT, real_NT


@torch.no_grad()
def score(
    network: PreTrainedModel,
    prompt_ids: Ragged,
    response_ids: Ragged,
    *,
    temperature: float,
    pad: int,
    microbatch: int,
) -> Ragged:
    """Logprobs of the response tokens, float32, at most 0. Microbatches are runs of samples in order; 0 is one run."""
    step = microbatch or len(prompt_ids)
    parts = []
    for start in range(0, len(prompt_ids), step):
        responses = cut(response_ids, start, start + step)
        logits_NTV, ids_NT, _ = response_logits(
            network, cut(prompt_ids, start, start + step), responses, temperature=temperature, pad=pad
        )
        logprobs_NT = selected_logprobs(logits_NTV, ids_NT).float().clamp_(max=0.0)
        parts.append(unpad_right(logprobs_NT, responses.lengths).values)
    return Ragged(torch.cat(parts), response_ids.lengths)
