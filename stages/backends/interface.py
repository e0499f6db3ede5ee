"""What every engine can do, and the descriptions that it is given. Knows signatures only; loads no tensor library."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ops.refit.transports import TRANSPORTS, Transport
from pipeline import Model
from pipeline.declare.columns import Ragged, take
from pipeline.declare.sharding import Shard, Sharding, Update
from pipeline.declare.task import Meeting

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ops.refit.share import Share

STREAM_ROLLOUT = 0x524F4C4C  # the random stream that sampling draws from; any other stream has another number


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Probabilities are softmax(logits / temperature); `min_p` (a share of the largest one), then `top_k` (0 is all), then
    `top_p` cut the tail off and what is left is normalised again. `greedy` takes the most probable token
    instead and ignores the rest. A response ends with an end-of-sequence token, with one of the `stop` texts, or after
    `max_tokens` tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    greedy: bool = False
    min_p: float = 0.0


@dataclass(frozen=True)
class Draws:
    """Where the random numbers of samples come from: the run's seed, and of each sample the admission number of its
    group and its index in it. A sample depends on these three, and on nothing beside it."""

    seed: int
    groups: tuple[int, ...]
    samples: tuple[int, ...]

    def uniforms(self, tokens: int) -> np.ndarray:
        """Numbers [N, tokens] in (0, 1)."""
        from ops.random import uniform

        return uniform(self.seed, STREAM_ROLLOUT, self.groups, self.samples, tokens)


@dataclass(frozen=True, eq=False)
class Generation:
    """Sampled responses: token ids with the closing token, their logprobs, and whether `max_tokens` cut them off.

    The logprobs are those of softmax(logits / temperature) over the *whole* vocabulary, also where top_k or top_p
    restricted the choice: `score` at the same temperature gives the same numbers. Greedy uses temperature 1.
    `versions` (int32, one per token) are the policy versions whose weights computed the logits that the tokens were
    drawn from. Where it rises within a response, the torch backend keeps the keys and values of the tokens before,
    which are the older weights'; vLLM computes them again.
    """

    response_ids: Ragged
    logprobs: Ragged
    truncated: torch.Tensor
    versions: Ragged


@dataclass(frozen=True, eq=False)
class Decoded:
    """Groups of a decode batch whose last sample ended at one token: ascending positions, and all their samples."""

    groups: tuple[int, ...]
    made: Generation


@dataclass(frozen=True)
class Cancelled:
    """Groups that were given up between two tokens: position -> tokens of the longest sample so far."""

    tokens: Mapping[int, int]


@dataclass(frozen=True)
class Served:
    """The hash of weights that are served, which no layout changes; and how they came: numbers by name."""

    sha256: str
    record: Mapping[str, float]


@dataclass(frozen=True)
class Route:
    """How a version travels: the transport, and the meeting of one that both sides carry out together."""

    transport: Transport
    meeting: Meeting | None = None


PULL = Route(TRANSPORTS["pull"])


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
    checkpoint_activations: bool = False

    def learning_rate(self, update: int) -> float:
        """The rate of an update, counted from 0."""
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        span = max(self.updates - self.warmup, 1)
        done = min((update - self.warmup) / span, 1.0)
        if self.schedule == "linear":
            return self.lr * (1.0 - done)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples that updates are made of. `old_logprobs` divide the ratio; `rollout_logprobs` are the sampler's, for
    a correction, and `ref_logprobs` the frozen model's, for a KL term. `columns` are what the loss reads beside them,
    one value per sample or per response token."""

    prompt_ids: Ragged
    response_ids: Ragged
    advantage: torch.Tensor
    old_logprobs: Ragged
    rollout_logprobs: Ragged | None = None
    ref_logprobs: Ragged | None = None
    columns: Mapping[str, torch.Tensor | Ragged] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def at(self, samples: Sequence[int]) -> Batch:
        """The samples at these ascending positions; views, where they are consecutive."""
        return Batch(
            part(self.prompt_ids, samples),
            part(self.response_ids, samples),
            self.advantage[list(samples)],
            part(self.old_logprobs, samples),
            None if self.rollout_logprobs is None else part(self.rollout_logprobs, samples),
            None if self.ref_logprobs is None else part(self.ref_logprobs, samples),
            {
                name: part(column, samples) if isinstance(column, Ragged) else column[list(samples)]
                for name, column in self.columns.items()
            },
        )


def cut(column: Ragged, start: int, stop: int) -> Ragged:
    """Samples `start` to `stop` of a ragged column, as a view."""
    first = sum(column.lengths[:start])
    lengths = column.lengths[start:stop]
    return Ragged(column.values[first : first + sum(lengths)], lengths)


def part(column: Ragged, samples: Sequence[int]) -> Ragged:
    """The samples at these ascending positions; a view, where they are consecutive."""
    first, last = samples[0], samples[-1]
    if last - first == len(samples) - 1:
        return cut(column, first, last + 1)
    return take(column, samples)  # type: ignore[return-value]


def samples_of(groups: Sequence[int], size: int) -> list[int]:
    """The positions of the samples of these groups of `size`, group by group."""
    return [sample for group in groups for sample in range(group * size, (group + 1) * size)]


def one_shard(prompt_ids: Ragged, response_ids: Ragged, sharding: Sharding | None = None) -> Shard:
    """The shard of a worker that has the whole batch."""
    lengths = {"P": prompt_ids.lengths, "T": response_ids.lengths}
    return (sharding or Sharding()).shards(lengths, ranks=1)[0]


class Learner(Protocol):
    """The model that is trained, with its optimizer. With several ranks, each has its share of the batch and all call
    every method together."""

    def update(self, batch: Batch, loss: Any, *, temperature: float, update: Update, packed: bool) -> dict[str, float]:
        """One optimizer update from the microbatches of `update`, which are positions in `batch`.

        Returns, alike on all ranks: loss, clip_fraction, ratio_max, grad_norm, lr, entropy, skipped, and, by the loss,
        kl and the metrics of its correction.
        """

    def save(self, folder: Path) -> None:
        """Weights and optimizer state, exact to the bit. Rank 0 writes."""

    def restore(self, folder: Path) -> None:
        """What `save` wrote. Raises CheckpointError where the files are not whole."""


class Texts(Protocol):
    """Texts and tokens of a model."""

    def encode(self, model: Model, texts: Sequence[str], *, chat: bool = False) -> Ragged:
        """Token ids of each text; with `chat`, of each list of messages, as JSON, in the model's chat template."""

    def decode(self, model: Model, ids: Ragged) -> list[str]:
        """The texts, without special tokens."""


class Sampler(Texts, Protocol):
    """An engine that samples from the served copy of a model."""

    def pieces(self, model: Model) -> list[bytes]:
        """What each token of the vocabulary adds to a text, as UTF-8, by its id."""

    def generate(self, model: Model, prompt_ids: Ragged, sampling: Sampling, draws: Draws | None) -> Generation:
        """Responses of the served copy. `draws` choose the tokens; greedy needs none."""

    def stream(
        self,
        model: Model,
        prompt_ids: Ragged,
        sampling: Sampling,
        draws: Draws | None,
        *,
        group_size: int,
        version: int = 0,
        unwanted: Callable[[int], bool] = lambda group: False,
    ) -> AsyncGenerator[Decoded | Cancelled, None]:
        """The same responses, each run of `group_size` samples as soon as all of them have ended.

        It awaits between tokens: other tasks of the worker run there, and `serve` there changes the weights of the
        tokens to come. `version` stamps the tokens of a copy that was never served. A group that is `unwanted`, by its
        position, is soon given up.
        """

    def serve(self, model: Model, shares: Sequence[Share], version: int, route: Route = PULL) -> Served:
        """Bring weights of a policy version into the served copy, also while a stream of it is between two tokens.
        `shares` are those of all trainer ranks, as `Trainer.share` gave them or as they came from another process.

        Returns the hash of what is served then, with a record of how it came. Raises StageError where names, shapes or
        dtypes differ, and the copy and its version are then what they were; or where what is served is not what was
        offered. Raises PeerLost where another worker did not get through: the copy is of no version then, and makes no
        token until one has come.
        """

    def served_version(self, model: Model, default: int = 0) -> int:
        """The version that was served last; `default` where none was, and for a frozen model."""


class Trainer(Texts, Protocol):
    """An engine that trains a model and scores with it, or with its frozen copy. The copies start equal."""

    def score(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, shard: Shard, *, temperature: float
    ) -> Ragged:
        """Logprobs of the response tokens: of the trained copy, or of a frozen model's frozen one. The shard cuts the
        samples into microbatches."""

    def learner(self, model: Model, optimization: Optimization) -> Learner:
        """The trained copy with an optimizer. One a model."""

    def trained_weights(self, model: Model) -> dict[str, torch.Tensor]:
        """The trained copy's weights on the CPU, by their names in a Hugging Face folder; a tied tensor once.
        A snapshot: later updates do not show.

        All ranks call it together; rank 0 gets the weights, the others nothing.
        """

    def share(self, model: Model, transport: Transport) -> Share:
        """This rank's part of the trained copy, as this transport offers it: often in memory that a later call fills
        again. All ranks call it together."""

    def carry(self, model: Model, shares: Sequence[Share], version: int, route: Route) -> None:
        """This rank's end of a transport that both sides carry out together: what it offered goes to those who `serve`.
        `shares` are those of all ranks. Raises PeerLost where another worker did not get through."""

    def training_flops(self, model: Model, prompt_ids: Ragged, response_ids: Ragged) -> float | None:
        """Floating point operations of a forward and a backward pass over these samples, without padding and
        recomputation; None for an architecture whose operations are not known."""

    def peak_tflops(self) -> float | None:
        """What this worker's device can do, dense in bfloat16; None where that is not known."""


class Judge(Protocol):
    """An engine that scores texts with a reward model."""

    def reward(
        self, model: Model, prompts: Sequence[str], responses: Sequence[str], *, chat: bool, microbatch: int
    ) -> torch.Tensor:
        """The scores [N] of a reward model, float32 on the CPU; of torch only. The first call for a model loads it,
        also one without samples."""


class Engine(Sampler, Trainer, Judge, Protocol):
    """All of it. One engine holds the models of all stages on its worker; a backend may have a part only."""
