"""Chooses tokens inside vLLM by the torch backend's rule and random numbers. Runs in the engine's processes.

vLLM's own sampler uses one generator per request, whose state depends on the number of draws, and returns logprobs
before the temperature or after truncation. Here the random number is a function of (sample, token), as everywhere in
Sluice, and the logprobs are those of softmax(logits / temperature) over the whole vocabulary. `Choice` makes the chosen
token's logit the largest in its row and keeps its logprob on the device (`logprobs`). A sample therefore does not
depend on its neighbors, on preemption or on a restart, and equals the torch backend's sample up to rounding. Nothing
here synchronizes with the device: vLLM prepares the next step while it computes this one.

Legend: B rows of a step, V vocabulary.
"""

from __future__ import annotations

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
    def of(message: dict[str, Any], tokens: list[int]) -> BatchRow:
        """Parse what `request_choice` wrote."""
        sampling = Sampling(**message["sampling"])
        if message["draw"] is None:
            return BatchRow(message["name"], sampling, None, tokens)
        seed, group, sample = message["draw"]
        # One spare: vLLM may already run another step when the last token turns out to be the last.
        return BatchRow(
            message["name"], sampling, Draws(seed, (group,), (sample,)).uniforms(sampling.max_tokens + 1)[0], tokens
        )


@dataclass(frozen=True, eq=False)
class Alike:
    """Rows of a batch that share sampling parameters."""

    sampling: Sampling
    rows: list[BatchRow]
    index_B: torch.Tensor
    kept_B: torch.Tensor  # rows in the logprob table

    def places(self) -> np.ndarray:
        """The position of each row's next token in its response."""
        return np.fromiter((len(row.tokens) for row in self.rows), np.int64, len(self.rows))

    def uniforms(self, places_B: np.ndarray) -> np.ndarray | None:
        """The random number for each row's next token; none for greedy."""
        if self.sampling.greedy:
            return None
        numbers = (row.uniforms_T[place] for row, place in zip(self.rows, places_B))  # type: ignore[index]
        return np.fromiter(numbers, np.float64, len(self.rows))


_seen: dict[str, BatchRow | int] = {}  # by request: its row, or its token count when it left
_kept = LogprobTable()


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
    return _kept.take(lengths)


def request_choice(name: str, sampling: Sampling, draw: tuple[int, int, int] | None) -> dict[str, Any]:
    """A request's settings for `Choice`, as plain values. `draw` is (seed, group, sample); None for greedy."""
    message = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "greedy": sampling.greedy,
    }
    return {"name": name, "sampling": message, "draw": None if draw is None else list(draw)}


class Choice(LogitsProcessor):
    """The logits processor for all requests."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        end_with_owner()
        self._device, self._pinned = device, is_pin_memory
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
            self._rows[index] = row = BatchRow.of((params.extra_args or {})["sluice"], tokens)
            _seen[row.name] = row
        for first, second, direction in batch_update.moved:
            moving, replaced = self._rows.pop(first, None), self._rows.pop(second, None)
            if moving is not None:
                self._rows[second] = moving
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[first] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose one token per row."""
        if self._alike is None or self._width != len(logits):
            self._alike, self._width = self._sorted(len(logits)), len(logits)
        for group in self._alike:
            places_B = group.places()
            numbers_B = group.uniforms(places_B)
            uniform_B = None if numbers_B is None else self._sent(numbers_B)
            of = logits if len(group.rows) == len(logits) else logits[group.index_B]
            tokens_B, logprobs_B = choose(of, group.sampling, uniform_B)
            logits[group.index_B, tokens_B] = self._greatest
            _kept.write(group.kept_B, self._sent(places_B), logprobs_B)
        return logits

    def _sorted(self, width: int) -> list[Alike]:
        alike: dict[Sampling, list[int]] = {}
        for index in sorted(self._rows):
            if index < width:
                alike.setdefault(self._rows[index].sampling, []).append(index)
        made = []
        for sampling, indices in alike.items():
            rows = [self._rows[index] for index in indices]
            kept = [_kept.row(row.name, sampling.max_tokens + 1, self._device) for row in rows]
            made.append(Alike(sampling, rows, self._sent(np.array(indices)), self._sent(np.array(kept))))
        return made

    def _sent(self, values_B: np.ndarray) -> torch.Tensor:
        """Copy to the device without synchronizing."""
        values = torch.from_numpy(values_B)
        return (values.pin_memory() if self._pinned else values).to(self._device, non_blocking=True)

    def _leave(self, index: int) -> None:
        row = self._rows.pop(index, None)
        if row is not None and _seen.get(row.name) is row:
            _seen[row.name] = len(row.tokens)
