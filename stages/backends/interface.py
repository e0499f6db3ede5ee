"""The protocols of engines, and the descriptions passed to them. Knows signatures only; loads no tensor library.

Every argument `images` has the files of each prompt, framed (stages/images.py). Only models whose prompts have images
get it, and only from backends that say `sees`: other engines need not take it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ops.refit.transports import TRANSPORTS, Transport
from pipeline import Model
from pipeline.declare.columns import Ragged, take
from pipeline.declare.sharding import Shard, Sharding, Update
from pipeline.declare.task import MeetingPlace

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ops.refit.share import Share

STREAM_ROLLOUT = 0x524F4C4C  # the random stream of sampling; other streams have other numbers


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Probabilities are softmax(logits / temperature), truncated by `min_p` (a fraction of the largest one), then `top_k`
    (0 means all), then `top_p`, and renormalized. `greedy` takes the most probable token instead and ignores the other
    settings. A response ends with an end-of-sequence token, with one of the `stop` texts, or after `max_tokens` tokens;
    with `limits`, after as many as the sample's, none of which is larger. `routes` asks for the experts of each token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    greedy: bool = False
    min_p: float = 0.0
    routes: bool = False
    limits: tuple[int, ...] = ()

    def limit(self, sample: int) -> int:
        """The most tokens of a sample, by its position."""
        return self.limits[sample] if self.limits else self.max_tokens

    def longest(self, prompts: Sequence[int]) -> tuple[int, int]:
        """The tokens of the prompt, and the limit, of the sample that may become longest."""
        return max(((length, self.limit(sample)) for sample, length in enumerate(prompts)), key=sum)


@dataclass(frozen=True)
class Draws:
    """Determines the random numbers of samples: the run's seed, and per sample the admission number of its group and
    its index in the group; with `places`, also how many tokens the sample has before those that are drawn. A sample
    depends on nothing else."""

    seed: int
    groups: tuple[int, ...]
    samples: tuple[int, ...]
    places: tuple[int, ...] = ()

    def of(self, position: int) -> tuple[int, int, int, int]:
        """The seed, group, sample and place of one sample."""
        place = self.places[position] if self.places else 0
        return self.seed, self.groups[position], self.samples[position], place

    def uniforms(self, tokens: int) -> np.ndarray:
        """Random numbers [N, tokens] in (0, 1)."""
        from ops.random import uniform

        return uniform(self.seed, STREAM_ROLLOUT, self.groups, self.samples, tokens, self.places or 0)


@dataclass(frozen=True, eq=False)
class Generation:
    """Sampled responses: token ids with the closing token, their logprobs, and whether `max_tokens` truncated them.

    Logprobs are those of softmax(logits / temperature) over the *whole* vocabulary, even if top_k or top_p truncated
    it: `score` at the same temperature gives the same numbers. Greedy uses temperature 1. `versions` (int32, one per
    token) are the policy versions of the weights that computed each token's logits. If the version rises within a
    response, the torch backend keeps the KV cache of earlier tokens, computed by older weights; vLLM recomputes it.
    `passes` of the model that the samples took part in, all together, are counted with speculation; else it is 0.
    `routes` are the experts of each token, if they were asked for, as the field of stages/routes.py has them, in any
    integer dtype; -1 for those that are not known.
    """

    response_ids: Ragged
    logprobs: Ragged
    truncated: torch.Tensor
    versions: Ragged
    passes: int = 0
    routes: Ragged | None = None


@dataclass(frozen=True, eq=False)
class Decoded:
    """Groups of a decode batch whose last samples ended at the same token: ascending positions, and all samples."""

    groups: tuple[int, ...]
    made: Generation


@dataclass(frozen=True)
class Cancelled:
    """Groups cancelled between two tokens: position -> length of the longest sample so far, in tokens."""

    tokens: Mapping[int, int]


@dataclass(frozen=True)
class ServedWeights:
    """The layout-independent hash of the served weights, and a record of the transfer: numbers by name."""

    sha256: str
    record: Mapping[str, float]


@dataclass(frozen=True)
class Route:
    """How a version is transferred: the transport, and the meeting if both sides carry."""

    transport: Transport
    meeting: MeetingPlace | None = None


PULL = Route(TRANSPORTS["pull"])


@dataclass(frozen=True)
class Optimization:
    """Settings of `Learner.update`: AdamW with decoupled weight decay, and a learning rate that follows `schedule`.

    The rate rises linearly over the first `warmup` updates; then it stays constant ("constant"), or falls to 0 at
    update `updates`, linearly ("linear") or as a half cosine ("cosine"). `clip_grad` limits the norm of the whole
    gradient; 0 means no limit.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    schedule: str = "constant"
    warmup: int = 0
    updates: int = 0
    checkpoint_activations: bool | Literal["mlp"] = False

    def learning_rate(self, update: int) -> float:
        """The learning rate of an update, counted from 0."""
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
    """The samples of updates. `advantage` is one per sample, or per response token. `old_logprobs` are the denominator
    of the ratio, None for those of the update's own pass, without a gradient; `rollout_logprobs` are the sampler's, for
    a correction, and `ref_logprobs` the frozen model's, for a KL term. `columns` are additional fields that the loss
    reads, one value per sample or per response token. `routes` are the experts to compute each token with
    (stages/routes.py); without them, routers choose. `images` are the files of the prompts, framed (stages/images.py).
    `sampled`, bool, are the response tokens that the policy drew, the only ones that a loss sees; None if it drew all.
    The counts of tokens of an `Update` are then of these."""

    prompt_ids: Ragged
    response_ids: Ragged
    advantage: torch.Tensor | Ragged
    old_logprobs: Ragged | None
    rollout_logprobs: Ragged | None = None
    ref_logprobs: Ragged | None = None
    columns: Mapping[str, torch.Tensor | Ragged] = field(default_factory=dict)
    routes: Ragged | None = None
    images: Ragged | None = None
    sampled: Ragged | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def at(self, samples: Sequence[int]) -> Batch:
        """The samples at these ascending positions; views if they are consecutive."""
        return Batch(
            part(self.prompt_ids, samples),
            part(self.response_ids, samples),
            _at(self.advantage, samples),
            None if self.old_logprobs is None else part(self.old_logprobs, samples),
            None if self.rollout_logprobs is None else part(self.rollout_logprobs, samples),
            None if self.ref_logprobs is None else part(self.ref_logprobs, samples),
            {name: _at(column, samples) for name, column in self.columns.items()},
            None if self.routes is None else part(self.routes, samples),
            None if self.images is None else part(self.images, samples),
            None if self.sampled is None else part(self.sampled, samples),
        )


def cut(column: Ragged, start: int, stop: int) -> Ragged:
    """Samples `start` to `stop` of a ragged column, as a view."""
    first = sum(column.lengths[:start])
    lengths = column.lengths[start:stop]
    return Ragged(column.values[first : first + sum(lengths)], lengths)


def part(column: Ragged, samples: Sequence[int]) -> Ragged:
    """The samples at these ascending positions; a view if they are consecutive."""
    first, last = samples[0], samples[-1]
    if last - first == len(samples) - 1:
        return cut(column, first, last + 1)
    return take(column, samples)  # type: ignore[return-value]


def _at(column: torch.Tensor | Ragged, samples: Sequence[int]) -> torch.Tensor | Ragged:
    return part(column, samples) if isinstance(column, Ragged) else column[list(samples)]


def samples_of(groups: Sequence[int], size: int) -> list[int]:
    """The positions of these groups' samples, `size` per group, group by group."""
    return [sample for group in groups for sample in range(group * size, (group + 1) * size)]


def one_shard(prompt_ids: Ragged, response_ids: Ragged, sharding: Sharding | None = None) -> Shard:
    """The shard of a single worker, which has the whole batch. Neighbors with the same prompt are a group."""
    lengths, sharding = {"P": prompt_ids.lengths, "T": response_ids.lengths}, sharding or Sharding()
    groups = _groups(prompt_ids) if sharding.shares else ()
    return sharding.shards(lengths, 1, groups)[0]


def _groups(prompt_ids: Ragged) -> list[int]:
    """The sizes of runs of neighbors with the same prompt."""
    prompts = prompt_ids.rows()
    starts = [i for i, row in enumerate(prompts) if not i or not row.equal(prompts[i - 1])]
    return [stop - start for start, stop in pairwise([*starts, len(prompts)])]


class Learner(Protocol):
    """The trained model with its optimizer. Each rank has its share of the batch, and all ranks call every method
    together."""

    def update(self, batch: Batch, loss: Any, *, temperature: float, update: Update, packed: bool) -> dict[str, float]:
        """Run one optimizer update from the microbatches of `update`, which are positions in `batch`.

        Returns, equal on all ranks: loss, clip_fraction, ratio_max, grad_norm, lr, entropy, skipped, and, depending on
        the loss, kl and the metrics of its correction; if the batch has routes, router_disagreement.
        """

    def own_logprobs(self) -> Ragged:
        """What the last update's pass computed for its samples, in ascending order, before it changed the weights: only
        of a batch without old logprobs. Equal on all ranks that share the samples; float32, on the CPU."""

    def save(self, folder: Path) -> None:
        """Save weights and optimizer state into an existing folder, bit-exact."""

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote. Raises CheckpointError if the files are incomplete."""


class Texts(Protocol):
    """Converts between texts and tokens of a model."""

    def encode(self, model: Model, texts: Sequence[str], *, chat: bool = False, images: Ragged | None = None) -> Ragged:
        """Token ids of each text; with `chat`, of each JSON list of messages, in the model's chat template. With
        `images`, the files of each prompt, an image has as many tokens as the model computes for it."""

    def decode(self, model: Model, ids: Ragged) -> list[str]:
        """The texts, without special tokens."""


class Sampler(Texts, Protocol):
    """An engine that samples from the served copy of a model."""

    def load(self, model: Model) -> None:
        """Load the served copy. Without this call, the first use loads it. Raises StageError if it cannot be loaded."""

    def pieces(self, model: Model) -> list[bytes]:
        """The UTF-8 bytes that each token of the vocabulary adds to a text, by id."""

    def generate(
        self, model: Model, prompt_ids: Ragged, sampling: Sampling, draws: Draws | None, *, images: Ragged | None = None
    ) -> Generation:
        """Sample responses from the served copy. `draws` determine the tokens; greedy needs none."""

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
        images: Ragged | None = None,
    ) -> AsyncGenerator[Decoded | Cancelled, None]:
        """Sample the same responses; yield each group of `group_size` samples as soon as all of them have ended.

        It awaits between tokens: other tasks of the worker run meanwhile, and a `serve` changes the weights of the
        remaining tokens. `version` stamps the tokens of a copy that was never served. A group that is `unwanted`, by
        its position, is soon cancelled.
        """

    def serve(self, model: Model, shares: Sequence[Share], version: int, route: Route = PULL) -> ServedWeights:
        """Load a policy version into the served copy, even while a stream of it is between two tokens.

        `shares` are those of all trainer ranks, as returned by `Trainer.share` or received from another process.

        Returns the hash of the weights that are then served, and a record of the transfer. Raises StageError if names,
        shapes or dtypes differ, leaving the copy and its version as they were; or if the served weights differ from the
        offered ones. Raises PeerLost if another worker failed: the copy then has no version, and samples nothing until
        a later version arrives.
        """

    def served_version(self, model: Model, default: int = 0) -> int:
        """The version served last; `default` if none was, and for a frozen model."""


class Trainer(Texts, Protocol):
    """An engine that trains a model and scores with it or with its frozen copy. The copies start equal."""

    def score(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, shard: Shard, *, temperature: float,
        images: Ragged | None = None,
    ) -> Ragged:  # fmt: skip
        """Logprobs of the response tokens under the trained copy, or under the frozen copy if the model is frozen. The
        shard divides the samples into microbatches."""

    def learner(self, model: Model, optimization: Optimization) -> Learner:
        """The trained copy with an optimizer. One per model."""

    def trained_weights(self, model: Model) -> dict[str, torch.Tensor]:
        """A snapshot of the trained copy's weights on the CPU, by their Hugging Face names; tied tensors once.

        All ranks call it together; rank 0 gets the weights, the others an empty dict.
        """

    def share(self, model: Model, transport: Transport) -> Share:
        """This rank's part of the trained copy, as this transport offers it, often in memory that a later call
        overwrites. All ranks call it together."""

    def carry(self, model: Model, shares: Sequence[Share], version: int, route: Route) -> Mapping[str, float]:
        """Send what this rank offered to the ranks that `serve`, if both sides carry. `shares` are those of all ranks.
        Returns metrics.

        Raises PeerLost if another worker failed."""

    def flops(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, *, training: bool, spared: Sequence[int] = ()
    ) -> float | None:
        """Floating-point operations of a forward pass over these samples, and with `training` of a backward pass,
        without padding and recomputation; None if they are unknown for the architecture. `spared` are the lengths of
        prompts that were not computed, since samples share them."""

    def peak_tflops(self) -> float | None:
        """Peak TFLOP/s of this worker's device, dense bfloat16; None if unknown."""


class Judge(Protocol):
    """An engine that scores texts with a reward model."""

    def reward(
        self, model: Model, prompts: Sequence[str], responses: Sequence[str], *, chat: bool, microbatch: int
    ) -> torch.Tensor:
        """The scores [N] of a reward model, float32 on the CPU; torch only. The first call for a model loads it, even
        without samples."""


class Quantizing(Protocol):
    """A trainer that also offers its weights quantized."""

    def share_quantized(self, model: Model, transport: Transport) -> Share:
        """What `share` returns, of the model whose matrices are 8-bit floats (stages.backends.model.blocks.py). Its
        record has `quant_error`, the relative error, and that of each layer."""


class Replaying(Protocol):
    """A trainer that also computes tokens with given experts; its learner does so if the batch has `routes`."""

    def score_replayed(
        self,
        model: Model,
        prompt_ids: Ragged,
        response_ids: Ragged,
        shard: Shard,
        *,
        temperature: float,
        routes: Ragged,
    ) -> Ragged:
        """What `score` returns, of the trained copy with these experts (stages/routes.py)."""


class Engine(Sampler, Trainer, Quantizing, Replaying, Judge, Protocol):
    """All methods. One engine holds the models of all stages on its worker; a backend may implement only a part."""
