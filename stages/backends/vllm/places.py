"""Where a vLLM rank holds the model's tensors, in the layout of vLLM 0.26 to 0.32. Arithmetic only.

    layout = Layout(tensors, [places(decoder, rank, ranks, 2) for rank in range(ranks)])

A buffer is a contiguous parameter, by vLLM's name. Queries, keys and values are stacked, and so are gate and up;
key-value heads are replicated if there are fewer than ranks; embeddings are padded to a multiple of 64 rows
(vllm/model_executor/layers: linear.py, vocab_parallel_embedding.py, fused_moe/layer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

from ops.refit.layout import ITEM_BYTES, Box, Place, Tensor
from stages.backends.model.decoder import Decoder, Dense, Grouped, Latent, Sparse, StateSpace
from stages.backends.model.families import HYBRID_NAMES, READER_NAMES
from stages.backends.model.precision import kept_dtype

Range: TypeAlias = tuple[int, int]
VOCAB_SHARES = 64  # embedding rows are a multiple of this


def places(decoder: Decoder, rank: int, ranks: int, item_bytes: int) -> list[Place]:
    """The places of one of `ranks` tensor-parallel ranks. Padding belongs to no place, and neither do tensors that vLLM
    computes others from, which its own loader must see."""
    found = list(_places(decoder, _Rank(rank, ranks, decoder.hidden, item_bytes)))
    if not decoder.renamed:
        return found
    return [replace(p, tensor=decoder.called(p.tensor), buffer=_buffer(decoder, p.buffer)) for p in found]


RENAMED = {  # parts of a folder's names, and vLLM's (models/nemotron_h.py and qwen3_vl.py, hf_to_vllm_mapper)
    (): (),
    HYBRID_NAMES: (("backbone.", "model."), (".embeddings.", ".embed_tokens.")),
    READER_NAMES: (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
}


def _buffer(decoder: Decoder, name: str) -> str:
    """vLLM's name of a parameter that has this name in a Llama."""
    name = decoder.called(name)
    for theirs, own in RENAMED[decoder.renamed]:
        name = name.replace(theirs, own)
    return name


@dataclass(frozen=True)
class _Rank:
    """A tensor-parallel rank, the hidden size, and the bytes of a number."""

    rank: int
    ranks: int
    hidden: int
    item_bytes: int

    def share(self, size: int) -> Range:
        """The rank's part of a dimension."""
        return size // self.ranks * self.rank, size // self.ranks * (self.rank + 1)

    def one(self, buffer: str, *box: Range) -> Iterator[Place]:
        """The place of a tensor of the same name."""
        yield from self.stacked(buffer, [(buffer, box)])

    def stacked(self, buffer: str, tensors: Sequence[tuple[str, Box]], along: int = 0) -> Iterator[Place]:
        """Boxes of several tensors, concatenated along a dimension of the parameter."""
        own = kept_dtype(buffer)
        item_bytes = ITEM_BYTES[own] if own else self.item_bytes
        extents = [[stop - start for start, stop in box] for _, box in tensors]
        shape = [*extents[0]]
        shape[along] = sum(extent[along] for extent in extents)
        strides = tuple(item_bytes * prod(shape[i + 1 :]) for i in range(len(shape)))
        offset = 0
        for (name, box), extent in zip(tensors, extents):
            yield Place(name, box, buffer, offset, strides)
            offset += extent[along] * strides[along]


def _places(decoder: Decoder, rank: _Rank) -> Iterator[Place]:
    every = (0, decoder.hidden)
    vocab = _vocab(decoder.vocab, rank.rank, rank.ranks)
    for name in ["model.embed_tokens.weight"] if decoder.tied else ["model.embed_tokens.weight", "lm_head.weight"]:
        if vocab[0] < vocab[1]:
            yield from rank.one(name, vocab, every)
    yield from rank.one("model.norm.weight", every)
    for number, layer in enumerate(decoder.layers):
        at = f"model.layers.{number}."
        for norm, part in (("input_layernorm", layer.mixer), ("post_attention_layernorm", layer.mlp)):
            if part is not None:
                yield from rank.one(f"{at}{norm}.weight", every)
                yield from PARTS[type(part)](at, part, rank)


def _grouped(at: str, part: Grouped, rank: _Rank) -> Iterator[Place]:
    every, at = (0, rank.hidden), f"{at}self_attn."
    queries = rank.share(part.heads)
    keys = rank.share(part.groups) if part.groups >= rank.ranks else _alone(rank.rank * part.groups // rank.ranks)
    own = [
        (f"{at}{letter}_proj", (part.head_dim * first, part.head_dim * last))
        for letter, (first, last) in zip("qkv", (queries, keys, keys))
    ]
    yield from rank.stacked(f"{at}qkv_proj.weight", [(f"{name}.weight", (rows, every)) for name, rows in own])
    if part.bias:
        yield from rank.stacked(f"{at}qkv_proj.bias", [(f"{name}.bias", (rows,)) for name, rows in own])
    if part.norm:
        yield from rank.one(f"{at}q_norm.weight", (0, part.head_dim))
        yield from rank.one(f"{at}k_norm.weight", (0, part.head_dim))
    yield from rank.one(f"{at}o_proj.weight", every, own[0][1])


def _latent(at: str, part: Latent, rank: _Rank) -> Iterator[Place]:
    """None: vLLM multiplies some of these matrices once, after loading (mla_attention.py, W_UK_T and W_UV)."""
    yield from ()


def _state_space(at: str, part: StateSpace, rank: _Rank) -> Iterator[Place]:
    """Matrices and norm. vLLM computes A from A_log and keeps a second view of the convolution's weights: these go
    through its loader, with what lies in the same modules (mamba/mamba_mixer2.py)."""
    at, every, boxes, begin = f"{at}mixer.", (0, rank.hidden), [], 0
    for number, size in enumerate(part.projected):
        whole = part.groups == 1 and number in (2, 3)  # B and C of the only group are on every rank
        first, last = (0, size) if whole else rank.share(size)
        boxes.append((f"{at}in_proj.weight", ((begin + first, begin + last), every)))
        begin += size
    yield from rank.stacked(f"{at}in_proj.weight", boxes)
    yield from rank.one(f"{at}norm.weight", rank.share(part.inner))
    yield from rank.one(f"{at}out_proj.weight", every, rank.share(part.inner))


def _dense(at: str, part: Dense, rank: _Rank) -> Iterator[Place]:
    yield from _feed_forward(f"{at}mlp.", part.inner, rank, gated=part.gated)


def _feed_forward(at: str, inner: int, rank: _Rank, *, gated: bool) -> Iterator[Place]:
    width, every = rank.share(inner), (0, rank.hidden)
    if gated:
        yield from rank.stacked(
            f"{at}gate_up_proj.weight", [(f"{at}{name}_proj.weight", (width, every)) for name in ("gate", "up")]
        )
    else:
        yield from rank.one(f"{at}up_proj.weight", width, every)
    yield from rank.one(f"{at}down_proj.weight", every, width)


def _mixture(at: str, part: Sparse, rank: _Rank) -> Iterator[Place]:
    at, experts, width, every = f"{at}mlp.", (0, part.experts), rank.share(part.inner), (0, rank.hidden)
    yield from rank.one(f"{at}gate.weight", experts, every)
    if part.sigmoid:
        yield from rank.one(f"{at}gate.e_score_correction_bias", experts)
    if part.shared:
        yield from _feed_forward(f"{at}shared_experts.", part.shared, rank, gated=part.gated)
    if part.latent:
        latent = (0, part.latent)
        yield from rank.one(f"{at}fc1_latent_proj.weight", latent, every)
        yield from rank.one(f"{at}fc2_latent_proj.weight", every, latent)
        every = latent
    names = [f"{at}experts.*.{name}_proj.weight" for name in (("gate", "up") if part.gated else ("up",))]
    yield from rank.stacked(f"{at}experts.w13_weight", [(name, (experts, width, every)) for name in names], along=1)
    down = [(f"{at}experts.*.down_proj.weight", (experts, every, width))]
    yield from rank.stacked(f"{at}experts.w2_weight", down)


PARTS: Mapping[type, Callable[[str, Any, _Rank], Iterator[Place]]] = {  # by the kind of a part of a layer
    Grouped: _grouped,
    Latent: _latent,
    StateSpace: _state_space,
    Dense: _dense,
    Sparse: _mixture,
}


def tensors(decoder: Decoder, dtype: str) -> dict[str, Tensor]:
    """The tensors of the model that have a place, with a layer's experts stacked, as a single rank holds them."""
    return {
        p.tensor: Tensor(tuple(stop for _, stop in p.box), kept_dtype(p.tensor) or dtype)
        for p in places(decoder, 0, 1, 1)
    }


def shapes(decoder: Decoder, ranks: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a rank's parameters, padding included."""
    found: dict[str, tuple[int, ...]] = {}
    for place in places(decoder, 0, ranks, 1):
        size = [stop - start for start, stop in place.box]
        dimension = 1 if place.buffer.endswith("w13_weight") else 0
        if place.buffer in found:
            size[dimension] += found[place.buffer][dimension]
        found[place.buffer] = tuple(size)
    for llama in ("model.embed_tokens.weight", "lm_head.weight"):
        if (name := _buffer(decoder, llama)) in found:
            found[name] = (_padded(decoder.vocab) // ranks, decoder.hidden)
    return found


def _alone(head: int) -> tuple[int, int]:
    return head, head + 1


def _padded(vocab: int) -> int:
    return -(-vocab // VOCAB_SHARES) * VOCAB_SHARES


def _vocab(vocab: int, rank: int, ranks: int) -> tuple[int, int]:
    share = _padded(vocab) // ranks
    return min(vocab, share * rank), min(vocab, share * (rank + 1))
