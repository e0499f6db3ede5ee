"""What every engine can do, and the descriptions that it is given. Knows signatures only; loads no tensor library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline import Model
from pipeline.columns import Ragged

if TYPE_CHECKING:
    import numpy as np
    import torch

STREAM_ROLLOUT = 0x524F4C4C  # the random stream that sampling draws from; any other stream has another number


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Probabilities are softmax(logits / temperature); `top_k` (0 is all) and then `top_p` cut the tail off and what is
    left is normalised again. `greedy` takes the most probable token instead and ignores the rest. A response ends
    with an end-of-sequence token, with one of the `stop` texts (each one token of the tokenizer), or after
    `max_tokens` tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    greedy: bool = False


@dataclass(frozen=True, eq=False)
class Generation:
    """Sampled responses: token ids with the closing token, their logprobs, and whether `max_tokens` cut them off.

    The logprobs are those of softmax(logits / temperature) over the *whole* vocabulary, also where top_k or top_p
    restricted the choice: `score` at the same temperature gives the same numbers. Greedy uses temperature 1.
    """

    response_ids: Ragged
    logprobs: Ragged
    truncated: torch.Tensor


@dataclass(frozen=True)
class Optimization:
    """How `Learner.update` steps: AdamW with decoupled weight decay, and a learning rate that follows `schedule`.

    The rate rises linearly over the first `warmup` updates; then it stays ("constant"), or falls to 0 at `updates`
    in a line ("linear") or a half cosine ("cosine"). `clip_grad` bounds the norm of the whole gradient; 0 is no bound.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    schedule: str = "constant"
    warmup: int = 0
    updates: int = 0
    microbatch: int = 0
    checkpoint_activations: bool = False


@dataclass(frozen=True, eq=False)
class Minibatch:
    """What one update is made of. `old_logprobs` divide the ratio; `ref_logprobs` are the frozen model's."""

    prompt_ids: Ragged
    response_ids: Ragged
    advantage: torch.Tensor
    old_logprobs: Ragged
    ref_logprobs: Ragged | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def part(self, start: int, stop: int) -> Minibatch:
        """Samples `start` to `stop`, as views."""
        return Minibatch(
            cut(self.prompt_ids, start, stop),
            cut(self.response_ids, start, stop),
            self.advantage[start:stop],
            cut(self.old_logprobs, start, stop),
            None if self.ref_logprobs is None else cut(self.ref_logprobs, start, stop),
        )


def cut(column: Ragged, start: int, stop: int) -> Ragged:
    """Samples `start` to `stop` of a ragged column, as a view."""
    first = sum(column.lengths[:start])
    lengths = column.lengths[start:stop]
    return Ragged(column.values[first : first + sum(lengths)], lengths)


class Learner(Protocol):
    """The model that is trained, with its optimizer."""

    def update(self, batch: Minibatch, loss: Any, *, temperature: float) -> dict[str, float]:
        """One optimizer update. Returns loss, kl, clip_fraction, ratio_max, grad_norm, lr, entropy, skipped."""

    def save(self, folder: Path) -> None:
        """Weights and optimizer state, exact to the bit."""

    def restore(self, folder: Path) -> None:
        """What `save` wrote. Raises CheckpointError where the files are not whole."""


class Engine(Protocol):
    """What a backend can do. One engine holds the models of all stages on its worker.

    Of one model there are up to three copies: the one that is trained, the one that is served to rollout, and the
    frozen one. They start equal.
    """

    def encode(self, model: Model, texts: Sequence[str]) -> Ragged:
        """Token ids of each text."""

    def decode(self, model: Model, ids: Ragged) -> list[str]:
        """The texts, without special tokens."""

    def generate(self, model: Model, prompt_ids: Ragged, sampling: Sampling, uniforms: np.ndarray | None) -> Generation:
        """Responses of the served copy. `uniforms` [N, max_tokens] in (0, 1) choose the tokens; greedy needs none."""

    def score(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, *, temperature: float, microbatch: int
    ) -> Ragged:
        """Logprobs of the response tokens: of the trained copy, or of a frozen model's frozen one."""

    def learner(self, model: Model, optimization: Optimization) -> Learner:
        """The trained copy with an optimizer. One a model."""

    def trained_weights(self, model: Model) -> dict[str, torch.Tensor]:
        """The trained copy's weights on the CPU, by name; a tied tensor once. A snapshot: later updates do not show."""

    def served_weights(self, model: Model) -> dict[str, torch.Tensor]:
        """The same of the served copy."""

    def serve(self, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
        """Load weights into the served copy. Raises StageError where names, shapes or dtypes differ."""

    def weight_hash(self, weights: Mapping[str, torch.Tensor]) -> str:
        """sha256 over names, dtypes, shapes and bytes, in order of the names."""
