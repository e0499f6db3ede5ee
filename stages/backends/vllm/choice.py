"""Chooses tokens inside vLLM by the torch backend's rule and random numbers. Runs in the engine's processes.

vLLM's own sampler uses one generator per request, whose state depends on the number of draws, and returns logprobs
before the temperature or after truncation. Here the random number is a function of (sample, token), as everywhere in
Sluice, and the logprobs are those of softmax(logits / temperature) over the whole vocabulary. `Choice` makes the chosen
token's logit the largest in its row and keeps its logprob on the device (`logprobs`). A sample therefore does not
depend on its neighbors, on preemption or on a restart, and equals the torch backend's sample up to rounding. Nothing
here synchronizes with the device: vLLM prepares the next step while it computes this one.

With speculation (`speculation`), a request has a row for each of the next places of its response, and gets a token for
each. The tokens of places after a wrong draft are dropped there; their logprobs are overwritten in a later step.

Legend: B requests of a step, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.backends.choose import choose
from stages.backends.interface import Draws, Sampling
from stages.backends.vllm.api import BatchUpdate, LogitsProcessor, MoveDirectionality
from stages.backends.vllm.environment import end_with_owner
from stages.backends.vllm.logprobs import LogprobTable


@dataclass(eq=False)
class BatchRow:
    """A request in the batch. `tokens` is vLLM's own list of sampled tokens, which grows in place."""

    name: str
    sampling: Sampling
    uniforms_T: np.ndarray | None
    tokens: list[int]

    @staticmethod
    def of(message: dict[str, Any], tokens: list[int], spare: int = 1) -> BatchRow:
        """Parse what `request_choice` wrote. It has random numbers for `spare` places after the last token: vLLM may
        already run another step when that turns out to be the last."""
        sampling = Sampling(**message["sampling"])
        if message["draw"] is None:
            return BatchRow(message["name"], sampling, None, tokens)
        seed, group, sample, place = message["draw"]
        uniforms_T = Draws(seed, (group,), (sample,), (place,)).uniforms(sampling.max_tokens + spare)[0]
        return BatchRow(message["name"], sampling, uniforms_T, tokens)


@dataclass(frozen=True, eq=False)
class Alike:
    """Requests of a batch that share sampling parameters."""

    rows: list[BatchRow]
    indices: np.ndarray  # of the requests in the batch
    kept: np.ndarray  # rows in the logprob table
    index_B: torch.Tensor  # both, on the device
    kept_B: torch.Tensor

    def places(self) -> np.ndarray:
        """The position of each row's next token in its response."""
        return np.fromiter((len(row.tokens) for row in self.rows), np.int64, len(self.rows))


_seen: dict[str, BatchRow | int] = {}  # by request: its row, or its token count when it left
_kept = LogprobTable()
_passes: Counter[str] = Counter()  # with speculation: the passes of the model that a request took part in


def tokens_of(names: list[str]) -> dict[str, int]:
    """The token count of each of these requests, 0 if it was never in the batch. Forgets all other requests."""
    kept = {name: _seen[name] for name in names if name in _seen}
    _seen.clear()
    _seen.update(kept)
    return {name: row if isinstance(row, int) else len(row.tokens) for name, row in kept.items()}


def logprobs_of(lengths: Mapping[str, int], others: Sequence[str]) -> list[bytes]:
    """Return the logprobs of the given number of tokens per request, float32, and forget these and the unread ones of
    `others`."""
    _kept.forget(others)
    for name in others:
        _passes.pop(name, None)
    return _kept.take(lengths)


def passes_of(names: Sequence[str]) -> list[int]:
    """Return in how many passes of the model each of these requests took part, and forget them; 0 without speculation.
    A part of a long prompt is a pass."""
    return [_passes.pop(name, 0) for name in names]


def request_choice(name: str, sampling: Sampling, draw: Sequence[int] | None) -> dict[str, Any]:
    """A request's settings for `Choice`, as plain values. `draw` is that of `Draws.of`; None for greedy."""
    message = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "greedy": sampling.greedy,
    }
    return {"name": name, "sampling": message, "draw": None if draw is None else list(draw)}


def offsets(counts_B: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... for each count: counts 2 and 3 give 0, 1, 0, 1, 2."""
    return np.arange(counts_B.sum()) - np.repeat(counts_B.cumsum() - counts_B, counts_B)


class Choice(LogitsProcessor):
    """The logits processor for all requests."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        end_with_owner()
        self._device, self._pinned = device, is_pin_memory
        speculation = vllm_config.speculative_config
        self._drafts = 0 if speculation is None else int(speculation.num_speculative_tokens)
        self._spare = 1 + 2 * self._drafts  # all that a step verifies, and then drafts
        # a Python number would be copied to the device each time
        self._greatest = torch.full((), torch.inf, device=device)
        self._rows: dict[int, BatchRow] = {}
        self._alike: list[Alike] | None = None  # rows by sampling parameters; None after the batch changed
        self._width = 0  # number of logit rows this was built for

    def is_argmax_invariant(self) -> bool:
        """False: the chosen token gets the largest logit."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Track which request is in which row as requests leave, arrive and move."""
        if batch_update is None:
            return
        self._alike = None
        for index in batch_update.removed:
            self._leave(index)
        for index, params, _, tokens in batch_update.added:
            self._leave(index)
            self._rows[index] = row = BatchRow.of((params.extra_args or {})["sluice"], tokens, self._spare)
            _seen[row.name] = row
        for first, second, direction in batch_update.moved:
            moving, replaced = self._rows.pop(first, None), self._rows.pop(second, None)
            if moving is not None:
                self._rows[second] = moving
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[first] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose one token per row."""
        for group in self._groups(len(logits)):
            tokens_B = self._chosen(group.rows, group.places(), group.kept_B, logits, group.index_B)
            logits[group.index_B, tokens_B] = self._greatest
        return logits

    def choose(self, logits_RV: torch.Tensor, counts_B: np.ndarray) -> torch.Tensor:
        """Choose the tokens of the next `counts_B` places of each request, whose rows follow each other."""
        first_B = counts_B.cumsum() - counts_B
        tokens_R = torch.zeros(len(logits_RV), dtype=torch.int64, device=self._device)
        for group in self._groups(len(counts_B)):
            each_B = counts_B[group.indices]
            offset_R = offsets(each_B)
            index_R = self._sent(np.repeat(first_B[group.indices], each_B) + offset_R)
            kept_R = self._sent(np.repeat(group.kept, each_B))
            rows = [row for row, count in zip(group.rows, each_B) for _ in range(count)]
            places_R = np.repeat(group.places(), each_B) + offset_R
            tokens_R[index_R] = self._chosen(rows, places_R, kept_R, logits_RV, index_R)
        return tokens_R

    def _chosen(
        self,
        rows: list[BatchRow],
        places: np.ndarray,
        kept_R: torch.Tensor,
        logits: torch.Tensor,
        index_R: torch.Tensor,
    ) -> torch.Tensor:
        """Choose the tokens of rows of one kind, and keep their logprobs."""
        sampling, uniform_R = rows[0].sampling, None
        if not sampling.greedy:
            numbers = (row.uniforms_T[place] for row, place in zip(rows, places))  # type: ignore[index]
            uniform_R = self._sent(np.fromiter(numbers, np.float64, len(rows)))
        of = logits if len(rows) == len(logits) else logits[index_R]
        tokens_R, logprobs_R = choose(of, sampling, uniform_R)
        _kept.write(kept_R, self._sent(places), logprobs_R)
        return tokens_R

    def _groups(self, width: int) -> list[Alike]:
        """The first `width` requests of the batch, by sampling parameters. Called once per pass, and counts it."""
        if self._alike is None or self._width != width:
            self._alike, self._width = self._sorted(width), width
        if self._drafts:
            _passes.update(row.name for group in self._alike for row in group.rows)
        return self._alike

    def _sorted(self, width: int) -> list[Alike]:
        alike: dict[Sampling, list[int]] = {}
        for index in sorted(self._rows):
            if index < width:
                alike.setdefault(self._rows[index].sampling, []).append(index)
        made = []
        for sampling, indices in alike.items():
            rows = [self._rows[index] for index in indices]
            kept = np.array([_kept.row(row.name, sampling.max_tokens + self._spare, self._device) for row in rows])
            places = np.array(indices)
            made.append(Alike(rows, places, kept, self._sent(places), self._sent(kept)))
        return made

    def _sent(self, values_B: np.ndarray) -> torch.Tensor:
        """Copy to the device without synchronizing."""
        values = torch.from_numpy(values_B)
        return (values.pin_memory() if self._pinned else values).to(self._device, non_blocking=True)

    def _leave(self, index: int) -> None:
        row = self._rows.pop(index, None)
        if row is not None and _seen.get(row.name) is row:
            _seen[row.name] = len(row.tokens)
