"""Time and memory of the `megatron` backend, from a model's shape: scoring and training.

What a layer keeps for the backward pass, in elements of bfloat16 per token (h hidden, q and k the widths of all query
and of all key-value heads, f the inner size): the inputs and the results of both norms (4 h), the result of the first
product (q + 2 k), normed and rotated queries and keys (q + k), attention's result (q), and the feed-forward layer's
(3 f). In benchmarks/results/gpu.update.h200.json and gpu.update.rows.h200.json the peak grows from one row length to
the other by that sum and the logits, within 1 %. What plain kernels and experts keep is fitted, to the row "none" of
the first file and to gpu.mixture.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from ops.flops import Hybrid, LatentSizes, Transformer
from pipeline import GraphError, Model
from pipeline.declare.sharding import Dynamic, Packed, Shard, Sharding
from pipeline.declare.work import GpuPart, GpuWork, Load
from pipeline.errors import Problem
from stages.forecast.shape import HALF, SINGLE, Divided, divided

OPTIMIZER = 3 * SINGLE  # bytes per weight: a float32 master weight and two moments
UPDATED = 2 * OPTIMIZER + SINGLE + HALF  # bytes per weight that an update reads and writes
CONTEXT_BYTES = 0.9 * 2**30  # CUDA and libraries; from "learner asleep" in gpu.step.colocated.h200 and .4B
# What torch's allocator holds while rows are trained, and does not use: bytes per trained weight, and, where rows
# differ, per number of a row's logits. From the most memory in use in gpu.step.apart.sync and .4B.
CACHED, CACHED_LOGITS = HALF, SINGLE
WORKSPACE_BYTES = 0.65 * 2**30  # during a pass; from the peaks of gpu.update.*.json
ROUND = 64  # tokens
Microbatch: TypeAlias = int | Dynamic | Packed
Recomputed: TypeAlias = Literal[False, "mlp", True]
RECOMPUTED: tuple[Recomputed, ...] = (False, "mlp", True)  # from the most that is kept to the least


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How a stage passes samples through a model.

    samples    of an update of all ranks
    training   whether gradients are computed
    recompute  which activations are computed again in the backward pass: none, those of feed-forward parts, or all
    epochs     over the same samples
    """

    model: Model
    microbatch: Microbatch
    sharding: Sharding
    samples: int
    training: bool = False
    recompute: Recomputed = False
    epochs: int = 1

    def work(self, load: Load) -> GpuWork | None:
        """Return the work of a task on the busiest rank; None for mixtures of experts and hybrids, whose time was not
        measured.

        With a pipeline of p stages a rank also waits for p - 1 passes per update. What ranks send each other is not
        counted. Raises GraphError if a sample does not fit into a row, or the model's shape is not known.
        """
        part = divided(self.model, load.group)
        shape, times = part.shape, 3 if self.training else 1  # the backward pass is twice the forward pass
        if shape.experts or shape.hybrid:
            return None
        taken = 2 if self.training and self.model.lora else times  # frozen weights have no gradients
        self._check(load)
        tokens, passes, updates, pairs, responses = self._rank(load)
        waits = 1 + (part.pipeline - 1) * updates / passes
        factor = self.epochs * waits * (4 / 3 if self.training and self.recompute is True else 1)
        whole = factor / (part.tensor * part.pipeline * part.context)
        again = self.training and self.recompute == "mlp"  # but for the last product, which nothing waits for
        made = shape.mlp_weights(shape.chosen) * (2 / 3 if shape.gated else 1 / 2) if again else 0.0
        products = tokens * (taken * shape.token_products + made) + taken * responses * shape.logit_weights
        return GpuWork(
            kind=f"megatron.{'plain.' if load.kernels == 'plain' else ''}{'training' if self.training else 'scoring'}",
            products=2 * products * whole,
            attention=2 * times * pairs * shape.attentions * shape.pair_products * whole,
            moved_bytes=times / 3 * tokens * shape.layers * kept(part, "fused") * HALF * whole,
            vocabulary_bytes=times / 3 * responses * shape.vocab * HALF * self.epochs / (part.tensor * part.context),
            layers=passes * part.layers * factor,
            passes=passes * factor,
            updated_bytes=UPDATED * _own(self.model, load) * updates * self.epochs if self.training else 0.0,
        )

    def parts(self, load: Load) -> list[GpuPart]:
        """Return what a pass takes on a rank while it runs."""
        tokens, alike = self._tokens(load)
        size = tokens * self._token_bytes(load)
        parts = [
            GpuPart(name=f"activations and logits of {tokens:,} tokens", size_bytes=size, when="task"),
            GpuPart(name="workspace", size_bytes=WORKSPACE_BYTES, when="task"),
        ]
        if self.training:
            part = divided(self.model, load.group)
            parts.append(GpuPart(name="cached by the allocator", size_bytes=self._cached_bytes(load), when="task"))
            if not alike:
                spare = CACHED_LOGITS * tokens * part.shape.vocab / part.tensor / part.context
                parts.append(GpuPart(name="logits of other rows, cached", size_bytes=spare, when="spare"))
        return parts

    def largest_row(self, load: Load, room_bytes: float) -> int:
        """Return the most tokens of a packed row whose pass takes at most `room_bytes` of a GPU, of whole samples if
        rows hold nothing else; 0 if not even the longest sample fits."""
        longest = load.prompt + load.longest
        room_bytes -= WORKSPACE_BYTES + self._cached_bytes(load)
        most = max(0, int(room_bytes / self._token_bytes(load)))
        return most // longest * longest if self._whole(load) or most < longest else most // ROUND * ROUND

    def fitting(self, load: Load, room_bytes: float) -> str:
        """Return the microbatch that fits into `room_bytes`, as it is written; "" if none does."""
        if tokens := self.largest_row(load, room_bytes):
            if isinstance(self.microbatch, Dynamic | Packed):
                return f"microbatch={type(self.microbatch).__name__}(tokens={tokens})"
            return f"microbatch={tokens // (load.prompt + load.longest)}"
        return ""

    def _rank(self, load: Load) -> tuple[float, float, int, float, float]:
        """Return the tokens, passes and updates of the first rank, as the driver divides the samples, the pairs of
        tokens of its attention, and the response tokens of its samples. A prompt that samples share counts once."""
        shard, mine, rows = self._rows(load)
        spared = shard.spared([load.prompt] * len(mine))
        pairs = sum(_pairs(load.prompt + n) for n in mine) - sum(map(_pairs, spared))
        return float(sum(rows) - sum(spared)), float(len(rows)), len(shard.updates), pairs, float(sum(mine))

    def _rows(self, load: Load) -> tuple[Shard, list[int], list[int]]:
        """Return the first rank's part, as the driver divides the samples, with the lengths of its responses and the
        tokens of each pass."""
        shard = _first_shard(self.sharding, load.prompt, tuple(load.responses), load.group_size, load.ranks)
        mine = [load.responses[i] for i in shard.index]
        rows = [
            sum(load.prompt + mine[i] for i in each.samples)
            if shard.packed
            else len(each.samples) * (each.prompt + each.response)
            for update in shard.updates
            for each in update.microbatches
        ]
        return shard, mine, rows

    def _check(self, load: Load) -> None:
        longest = load.prompt + max(load.responses)
        if isinstance(self.microbatch, Dynamic | Packed) and self.microbatch.tokens < longest:
            raise GraphError(
                Problem(
                    where=str(self.model.location),
                    what=f"a sample of {longest:,} tokens does not fit into microbatch={self.microbatch}",
                    why=f"prompts are taken to have {load.prompt} tokens",
                    fix=f"microbatch={type(self.microbatch).__name__}(tokens={longest}), or --assume prompt=TOKENS",
                )
            )

    def _tokens(self, load: Load) -> tuple[int, bool]:
        """Return the most tokens of a pass, with samples that are as long as they may become, and whether all passes
        have so many."""
        longest, mine = load.prompt + load.longest, -(-self.samples // load.ranks)
        if not isinstance(self.microbatch, Dynamic | Packed):
            return min(self.microbatch or mine, mine) * longest, False
        if self._whole(load) and self.microbatch.tokens >= longest:
            rows = self._rows(load)[2]
            return max(rows), min(rows) == max(rows)
        return min(self.microbatch.tokens, mine * longest), False

    def _whole(self, load: Load) -> bool:
        """Whether rows hold whole samples and nothing else: every one is as long as it may become, and sharing prompts
        does not spare the twentieth of the tokens for which the driver does it."""
        spared, count = load.prompt * (load.group_size - 1), load.group_size * (load.prompt + load.longest)
        return all(length == load.longest for length in load.responses) and not (
            self.sharding.shares and spared > count / 20
        )

    def _cached_bytes(self, load: Load) -> float:
        """What the allocator would give up too, but a row that leaves no room for it waits for that each time."""
        return CACHED * divided(self.model, load.group).trained_by(self.model) if self.training else 0.0

    def _token_bytes(self, load: Load) -> float:
        """Return the bytes of activations and logits per token of a pass. The first stage of a pipeline of p keeps p
        passes."""
        part = divided(self.model, load.group)
        layer = kept(part, load.kernels) * HALF
        logits = part.shape.vocab * HALF * (2 if load.kernels == "plain" else 1)
        found = logits + layer
        if self.training:
            layers = part.layers * part.pipeline
            inner = fed_forward(part, load.kernels) * HALF
            kept_bytes: Mapping[Recomputed, float] = {
                False: layers * layer,
                "mlp": layers * (layer - inner) + inner,
                True: layers * part.shape.hidden * HALF + layer,
            }
            found = logits + kept_bytes[self.recompute]
        return found / part.tensor / part.context


@lru_cache(maxsize=64)
def _first_shard(
    sharding: Sharding, prompt: int, responses: tuple[int, ...], group_size: int, ranks: int
) -> Shard:  # cached, since choices of flags differ in other things
    lengths = dict(zip(sharding.lengths, ([prompt] * len(responses), responses)))
    return sharding.shards(lengths, ranks, [group_size] * (len(responses) // group_size))[0]


def _pairs(tokens: int) -> float:
    """Return the pairs of a query and a key in causal attention."""
    return tokens * (tokens + 1) / 2


def kept(part: Divided, kernels: str) -> float:
    """Return the elements that a whole layer keeps per token for its backward pass."""
    shape = part.shape
    if shape.hybrid:
        return _hybrid(shape, shape.hybrid)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 3 * query + 3 * key if shape.latent is None else _latent(shape.heads, shape.latent)
    found = 4 * shape.hidden + attention + fed_forward(part, kernels)
    if kernels == "plain":  # key-value heads repeated, rotated queries and keys a second time
        found += 3 * query - key
    return found


def fed_forward(part: Divided, kernels: str) -> float:
    """Return the elements of `kept` that are made inside a feed-forward part."""
    shape = part.shape
    if hybrid := shape.hybrid:
        return (hybrid.mixtures * _inner(shape) + 2 * shape.dense * shape.dense_inner) / shape.layers
    found = shape.chosen * (7 * shape.hidden + 4 * shape.intermediate) if shape.experts else 3 * shape.intermediate
    return found + 3 * shape.shared + (2 * shape.intermediate if kernels == "plain" else 0)  # SwiGLU step by step


def _inner(shape: Transformer) -> float:
    """Return the elements that a mixture without gates keeps per token."""
    return shape.chosen * (4 * (shape.outer or shape.hidden) + 2 * shape.intermediate) + 2 * shape.shared


def _hybrid(shape: Transformer, sizes: Hybrid) -> float:
    """Return the elements that a layer with one part keeps per token, in the mean: its input and what it is normed to,
    and of Mamba-2 projections, convolved values, outputs and normed outputs. Counted, not measured."""
    mamba = sizes.mamba * (4 * sizes.channels + 2 * sizes.convolved + sizes.heads)
    attention = 3 * sizes.attention * shape.head_dim * (shape.heads + shape.kv_heads)
    feed_forward = sizes.mixtures * _inner(shape) + 2 * shape.dense * shape.dense_inner
    return 2 * shape.hidden + (mamba + attention + feed_forward) / shape.layers


def _latent(heads: int, sizes: LatentSizes) -> int:
    """Return the elements that latent attention keeps per token: latents and normed latents, queries and turned
    queries, keys and values as they come from a latent and as attention takes them, and its result. Counted, not
    measured."""
    query = heads * (sizes.plain + sizes.rotary)
    return 2 * (sizes.query + sizes.key_value) + 3 * query + heads * (sizes.plain + 3 * sizes.value)


def held(model: Model, load: Load, *, trains: bool) -> list[GpuPart]:
    """Return what a model holds on a rank between tasks."""
    part = divided(model, load.group)
    weights, trained = part.weights, part.trained_by(model)
    frozen = model.lora is not None  # a trainer that sleeps moves what it does not send
    parts = [
        GpuPart(name="CUDA", size_bytes=CONTEXT_BYTES),
        GpuPart(name=f"weights of {model.source}", size_bytes=HALF * weights, when="moved" if frozen else "always"),
    ]
    if trains:
        parts += [
            GpuPart(name="master weights and moments", size_bytes=OPTIMIZER * _own(model, load), when="moved"),
            GpuPart(name="gradients", size_bytes=SINGLE * trained, when="dropped"),
        ]
        if model.lora:
            parts.append(GpuPart(name="adapter", size_bytes=HALF * trained))
    return parts


def _own(model: Model, load: Load) -> float:
    """Return the weights of which a rank has the moments. The distributed optimizer divides them over the ranks that
    hold the same ones: experts over as many fewer as `expert_parallel` says."""
    part, group = divided(model, load.group), load.group
    ranks = load.ranks * group.context_parallel
    trained = part.trained_by(model)
    experts = 0.0 if model.lora else part.expert_matrices
    apart = group.tensor_parallel * ranks / part.experts  # expert-data-parallel ranks
    return (trained - experts) / ranks + experts / max(1.0, apart)


def exchanged_bytes(model: Model, load: Load) -> float:
    """Return the bytes between GPU and host of one scoring with frozen weights: they and the trained ones change places
    before it and after it. A model with an adapter has one copy."""
    return 0.0 if model.lora else 4 * HALF * divided(model, load.group).weights
