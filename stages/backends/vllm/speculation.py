"""Verifies drafted tokens inside vLLM, and draws them if a model drafts. Runs in the engine's processes.

A draft proposes the next tokens of a request, and one pass of the model computes the logits of all their places. vLLM's
rejection sampler (Leviathan et al. 2023, arXiv 2211.17192) keeps the distribution, but draws other random numbers.
`Verifier` keeps the sample: `Choice` chooses the token of each place from its logits and its own random number, as
without drafts, and a draft is accepted if it is that token. The first token that differs from its draft is still right,
since its logits depend on accepted tokens only.

A model that drafts chooses each token with the random number of its place too, by the same sampling parameters. Where
its distribution is that of the policy it therefore proposes the very token, not only the most probable one.

Legend: B requests of a step, R rows of logits, D drafted tokens, K places, T places ahead, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from stages.backends.choose import choose
from stages.backends.vllm.api import LogitsProcessors, SamplerOutput
from stages.backends.vllm.choice import Choice

NONE = -1  # what vLLM ignores: no token


class Verifier(Choice):
    """Replaces the rejection sampler of the first model runner, and the draft model's choice of tokens.

    vLLM 0.26 calls `apply`, as a logits processor, in steps in which no request has a draft.
    """

    def __init__(self, model_runner: Any, device: torch.device) -> None:
        super().__init__(model_runner.vllm_config, device, device.type == "cuda")
        drafts = model_runner.speculative_config.uses_draft_model()
        self._drafter: Any = model_runner.drafter if drafts else None
        if self._drafter is not None:
            self._drafter._sample_draft_tokens = self.draft
        self._ahead_BT = torch.zeros(0, 0)  # random numbers of the places after each request's next one
        self._next_B = torch.zeros(0)  # which of them is that of the next draft

    def __call__(self, drafted: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Return the accepted tokens of each request and the one after them. `drafted` is vLLM's metadata of a step."""
        counts_B = np.array(drafted.num_draft_tokens) + 1
        tokens_R, ends_B = self.choose(logits, counts_B), drafted.cu_num_sampled_tokens
        tokens_BK = accepted(tokens_R, drafted.draft_token_ids, ends_B, int(counts_B.max()))
        if self._drafter is not None:
            self._begin_drafts((tokens_BK != NONE).sum(1))
        return SamplerOutput(sampled_token_ids=tokens_BK.int(), logprobs_tensors=None)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose one token per row."""
        made = super().apply(logits)
        if self._drafter is not None:
            self._begin_drafts(torch.ones(len(logits), dtype=torch.int64, device=self._device))
        return made

    def draft(self, hidden: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, None]:
        """Choose the next draft of each request from the draft model's last hidden states [B, H], in vLLM's form."""
        logits_BV = self._drafter.model.compute_logits(hidden)
        uniform_B = self._ahead_BT.gather(1, self._next_B[:, None])[:, 0]
        self._next_B = self._next_B + 1
        tokens_B = torch.zeros(len(logits_BV), dtype=torch.int64, device=self._device)
        for group in self._alike or ():
            sampling = group.rows[0].sampling
            own_B = None if sampling.greedy else uniform_B[group.index_B]
            tokens_B[group.index_B] = choose(logits_BV[group.index_B], sampling, own_B)[0]
        return tokens_B, None

    def _begin_drafts(self, gained_B: torch.Tensor) -> None:
        """Have the random numbers of the next drafts ready. Only the device knows `gained_B`, the tokens that each
        request gains in this step."""
        self._next_B = gained_B - 1
        tokens = 2 * self._drafts
        ahead_BT = np.zeros((len(gained_B), tokens))
        for group in self._alike or ():
            for index, row, place in zip(group.indices, group.rows, group.places()):
                if row.uniforms_T is not None:
                    ahead_BT[index] = row.uniforms_T[place + 1 : place + 1 + tokens]
        self._ahead_BT = self._sent(ahead_BT)


def accepted(tokens_R: torch.Tensor, drafts_D: torch.Tensor, ends_B: torch.Tensor, places: int) -> torch.Tensor:
    """Return the tokens [B, K] of each request up to the first that differs from its draft, then NONE.

    The rows of request i, at most `places`, end before `ends_B[i]`; each but the last has a draft, in the same order.
    """
    ends_B, at_R = ends_B.long(), torch.arange(len(tokens_R), device=tokens_R.device)
    row_R = torch.searchsorted(ends_B, at_R, right=True)
    column_R = at_R - pad(ends_B, (1, -1))[row_R]
    is_right_R = (tokens_R == pad(drafts_D, (0, 1))[at_R - row_R]) & (at_R + 1 < ends_B[row_R])
    tokens_BK = torch.full((len(ends_B), places), NONE, dtype=tokens_R.dtype, device=tokens_R.device)
    is_right_BK = torch.zeros_like(tokens_BK, dtype=torch.bool)
    tokens_BK[row_R, column_R], is_right_BK[row_R, column_R] = tokens_R, is_right_R
    tokens_BK[:, 1:].masked_fill_(~is_right_BK[:, :-1].cumprod(1).bool(), NONE)
    return tokens_BK


def install(model_runner: Any, device: torch.device) -> None:
    """Have the first model runner choose tokens so. vLLM refuses logits processors of others with speculation."""
    verifier = Verifier(model_runner, device)
    model_runner.input_batch.logitsprocs = LogitsProcessors([verifier])
    model_runner.rejection_sampler = verifier
