"""Chooses tokens inside vLLM's second model runner by the rule of `choice`, without a loop over requests.

The first model runner keeps its requests in lists of the host, and so does `choice`. The second one keeps them on the
device, and so does `SlotTable`: the random numbers and the logprobs of each request, by its row. The place of the next
token in its response follows from its position.

Legend: B rows of a step, S slots of the model runner, R rows of the tables (one per request), T tokens of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from stages.backends.choose import choose
from stages.backends.interface import Sampling
from stages.backends.vllm.api import SecondSampler, second_runner
from stages.backends.vllm.choice import BatchRow
from stages.backends.vllm.environment import end_with_owner
from stages.backends.vllm.logprobs import LogprobTable

SPARE = 2  # places after the last token: one for a step that vLLM runs too many, one for what is no token
_OTHER = -1  # the kind of a slot whose request has no settings of ours, as in vLLM's warm-up


class SlotTable:
    """What the requests in the slots of a model runner need for their next tokens."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._logprobs = LogprobTable()
        self._uniforms_RT = torch.zeros((0, 0), dtype=torch.float64, device=device)
        self._counts_R = torch.zeros(0, dtype=torch.int64, device=device)
        self._row_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self._kind_S = np.full(slots, _OTHER)
        self._kinds: dict[Sampling, int] = {}  # the numbers of sampling parameters

    def add(self, slot: int, settings: dict[str, Any] | None) -> None:
        """Put a request with these settings (`choice.request_choice`) into a slot, for the first time or again."""
        if settings is None:
            self._kind_S[slot] = _OTHER
            return
        request = BatchRow.of(settings, [])
        self._kind_S[slot] = self._kinds.setdefault(request.sampling, len(self._kinds))
        row = self._logprobs.row(request.name, request.sampling.max_tokens + SPARE, self._device)
        self._grow()
        self._row_S[slot] = row
        self._counts_R[row] = 0
        if request.uniforms_T is not None:
            numbers_T = torch.from_numpy(request.uniforms_T)
            if self._device.type == "cuda":
                numbers_T = numbers_T.pin_memory()
            self._uniforms_RT[row, : len(numbers_T)].copy_(numbers_T, non_blocking=True)

    def has(self, slots_B: np.ndarray) -> bool:
        """Whether all these slots have requests with settings of ours."""
        return bool((self._kind_S[slots_B] != _OTHER).all())

    def choose(
        self, logits_BV: torch.Tensor, slots_B: np.ndarray, slot_B: torch.Tensor, place_B: torch.Tensor
    ) -> torch.Tensor:
        """Choose the token of each row, for its place in the response. A place below 0 is none: what is chosen there is
        not kept. `slots_B` are the slots on the host, `slot_B` on the device."""
        row_B, is_token_B = self._row_S[slot_B], place_B >= 0
        at_B = torch.where(is_token_B, place_B, self._uniforms_RT.shape[1] - 1)
        tokens_B, logprobs_B = self._chosen(logits_BV, self._kind_S[slots_B], self._uniforms_RT[row_B, at_B])
        self._logprobs.write(row_B, at_B, logprobs_B)
        self._counts_R[row_B] = torch.where(is_token_B, place_B + 1, self._counts_R[row_B])
        return tokens_B

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """Return how many tokens each of these requests has, 0 if it was never in a slot."""
        counts = self._counts_R.tolist()
        rows = {name: self._logprobs.find(name) for name in names}
        return {name: 0 if row is None else counts[row] for name, row in rows.items()}

    def take(self, lengths: Mapping[str, int], others: Iterable[str]) -> list[bytes]:
        """Return the logprobs of the given number of tokens per request, float32, and forget these and the unread ones
        of `others`."""
        self._logprobs.forget(others)
        return self._logprobs.take(lengths)

    def _chosen(
        self, logits_BV: torch.Tensor, kinds_B: np.ndarray, uniform_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        samplings, present = list(self._kinds), np.unique(kinds_B)
        if len(present) == 1:
            sampling = samplings[present[0]]
            return choose(logits_BV, sampling, None if sampling.greedy else uniform_B)
        tokens_B = torch.empty(len(logits_BV), dtype=torch.int64, device=self._device)
        logprobs_B = torch.empty(len(logits_BV), dtype=torch.float32, device=self._device)
        for kind in present:
            index = torch.from_numpy(np.flatnonzero(kinds_B == kind)).to(self._device)
            sampling = samplings[kind]
            made = choose(logits_BV[index], sampling, None if sampling.greedy else uniform_B[index])
            tokens_B[index], logprobs_B[index] = made
        return tokens_B, logprobs_B

    def _grow(self) -> None:
        """Give the tables the shape of that of the logprobs."""
        (rows, width), after = self._uniforms_RT.shape, self._logprobs.shape
        if (rows, width) == after:
            return
        uniforms_RT = torch.zeros(after, dtype=torch.float64, device=self._device)
        counts_R = torch.zeros(after[0], dtype=torch.int64, device=self._device)
        uniforms_RT[:rows, :width], counts_R[:rows] = self._uniforms_RT, self._counts_R
        self._uniforms_RT, self._counts_R = uniforms_RT, counts_R


class ChoosingSampler(SecondSampler):
    """The sampler of the second model runner. Batches with requests of vLLM's own are sampled as vLLM does."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        end_with_owner()
        self.table = SlotTable(self.req_states.max_num_reqs, self.req_states.device)

    def add_request(self, req_idx: int, *given: Any) -> None:
        """Keep the settings of a request that gets this slot."""
        super().add_request(req_idx, *given)
        self.table.add(req_idx, (given[-1].extra_args or {}).get("sluice"))

    def sample(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray, pos: torch.Tensor,
        *given: Any, **settings: Any,
    ) -> Any:  # fmt: skip
        """Choose one token per row. Also returns the logits."""
        if len(idx_mapping_np) != len(logits) or not self.table.has(idx_mapping_np):
            return super().sample(logits, expanded_idx_mapping, idx_mapping_np, pos, *given, **settings)
        states, slot_B = self.req_states, expanded_idx_mapping.long()
        length_B = pos + 1
        place_B = length_B - states.prompt_len.gpu[slot_B]
        place_B = torch.where(length_B >= states.prefill_len.gpu[slot_B], place_B, -1)  # else more of it comes first
        return self.table.choose(logits, idx_mapping_np, slot_B, place_B), logits


def table_of(model_runner: Any) -> SlotTable | None:
    """Return the table of a worker's model runner; None if it is the first one."""
    sampler = getattr(model_runner, "sampler", None)
    return sampler.table if isinstance(sampler, ChoosingSampler) else None


def install() -> None:
    """Let the second model runner of this process choose tokens so."""
    second_runner().Sampler = ChoosingSampler
