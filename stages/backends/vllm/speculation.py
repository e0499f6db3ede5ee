"""Verifies drafted tokens inside vLLM. Runs in the engine's processes; knows no drafts but their tokens.

A draft proposes the next tokens of a request, and one pass of the model computes the logits of all their places. vLLM's
rejection sampler (Leviathan et al. 2023, Chen et al. 2023) keeps the distribution, but draws other random numbers.
`Verifier` keeps the sample: `Choice` chooses the token of each place from its logits and its own random number, as
without drafts, and a draft is accepted if it is that token. The first token that differs from its draft is still right,
since its logits depend on accepted tokens only.

Legend: B requests of a step, R rows of logits, D drafted tokens, K places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stages.backends.vllm.api import LogitsProcessors, SamplerOutput
from stages.backends.vllm.choice import Choice, offsets

NONE = -1  # what vLLM ignores: no token
_NO_DRAFT = -2


class Verifier:
    """Replaces the rejection sampler of the first model runner."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def __call__(self, drafted: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Return the accepted tokens of each request and the one after them. `drafted` is vLLM's metadata of a step."""
        counts_B = np.array(drafted.num_draft_tokens) + 1
        tokens_R = self._choice.choose(logits, counts_B)
        return SamplerOutput(
            sampled_token_ids=accepted(tokens_R, drafted.draft_token_ids, counts_B).int(), logprobs_tensors=None
        )


def accepted(tokens_R: torch.Tensor, drafts_D: torch.Tensor, counts_B: np.ndarray) -> torch.Tensor:
    """Return the tokens [B, K] of each request up to the first that differs from its draft, then NONE.

    Request i has `counts_B[i]` rows of `tokens_R` and one draft less. The token in row j is compared with draft j.
    """
    device, width = tokens_R.device, int(counts_B.max())
    tokens_BK = torch.full((len(counts_B), width), NONE, dtype=torch.int64, device=device)
    tokens_BK[_at(counts_B, device)] = tokens_R
    drafts_BK = torch.full((len(counts_B), width - 1), _NO_DRAFT, dtype=torch.int64, device=device)
    drafts_BK[_at(counts_B - 1, device)] = drafts_D.long()
    is_right_BK = (tokens_BK[:, :-1] == drafts_BK).cumprod(1).bool()
    tokens_BK[:, 1:].masked_fill_(~is_right_BK, NONE)
    return tokens_BK


def install(model_runner: Any, device: torch.device) -> None:
    """Have the first model runner choose tokens so. Its own logits processors are refused with speculation."""
    choice = Choice(model_runner.vllm_config, device, device.type == "cuda")
    model_runner.input_batch.logitsprocs = LogitsProcessors([choice])
    model_runner.rejection_sampler = Verifier(choice)


def _at(counts_B: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the first `counts_B` places of each row."""
    rows = np.repeat(np.arange(len(counts_B)), counts_B)
    return _sent(rows, device), _sent(offsets(counts_B), device)


def _sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to the device without synchronizing."""
    tensor = torch.from_numpy(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
