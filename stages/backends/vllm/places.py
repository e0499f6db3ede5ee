"""Where a vLLM rank holds the model's tensors, in the layout of vLLM 0.26 to 0.32. Arithmetic only.

    layout = Layout(tensors, [places(decoder, rank, ranks, 2) for rank in range(ranks)])

A buffer is a contiguous parameter, by vLLM's name. Queries, keys and values are stacked, and so are gate and up;
key-value heads are replicated if there are fewer than ranks; embeddings are padded to a multiple of 64 rows
(vllm/model_executor/layers: linear.py, vocab_parallel_embedding.py, fused_moe/layer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ops.refit.layout import Box, Place, Tensor
from stages.backends.model.decoder import Decoder

VOCAB_SHARES = 64  # embedding rows are a multiple of this


def places(decoder: Decoder, rank: int, ranks: int, item_bytes: int) -> list[Place]:
    """The places of one of `ranks` tensor-parallel ranks. Padding belongs to no place."""
    return list(_places(decoder, rank, ranks, item_bytes))


def _places(decoder: Decoder, rank: int, ranks: int, item_bytes: int) -> Iterator[Place]:
    every = (0, decoder.hidden)

    def share(size: int) -> tuple[int, int]:
        return size // ranks * rank, size // ranks * (rank + 1)

    def one(buffer: str, box: Box) -> Iterator[Place]:
        """The place of a tensor of the same name."""
        yield from _stacked(buffer, [(buffer, box)], item_bytes)

    vocab = _vocab(decoder.vocab, rank, ranks)
    embeddings = ["model.embed_tokens.weight"] if decoder.tied else ["model.embed_tokens.weight", "lm_head.weight"]
    for name in embeddings:
        if vocab[0] < vocab[1]:
            yield from one(name, (vocab, every))
    yield from one("model.norm.weight", (every,))
    queries = share(decoder.heads)
    keys = share(decoder.groups) if decoder.groups >= ranks else _alone(rank * decoder.groups // ranks)
    heads = [
        (letter, (decoder.head_dim * first, decoder.head_dim * last))
        for letter, (first, last) in zip("qkv", (queries, keys, keys))
    ]
    width = share(decoder.intermediate)
    for layer in range(decoder.layers):
        at = f"model.layers.{layer}."
        yield from one(f"{at}input_layernorm.weight", (every,))
        yield from one(f"{at}post_attention_layernorm.weight", (every,))
        own = [(f"{at}self_attn.{letter}_proj", rows) for letter, rows in heads]
        yield from _stacked(f"{at}self_attn.qkv_proj.weight", [(f"{n}.weight", (r, every)) for n, r in own], item_bytes)
        if decoder.qkv_bias:
            yield from _stacked(f"{at}self_attn.qkv_proj.bias", [(f"{n}.bias", (r,)) for n, r in own], item_bytes)
        if decoder.qk_norm:
            yield from one(f"{at}self_attn.q_norm.weight", ((0, decoder.head_dim),))
            yield from one(f"{at}self_attn.k_norm.weight", ((0, decoder.head_dim),))
        yield from one(f"{at}self_attn.o_proj.weight", (every, heads[0][1]))
        if decoder.experts:
            experts = (0, decoder.experts)
            yield from one(f"{at}mlp.gate.weight", (experts, every))
            names = [f"{at}mlp.experts.*.{part}_proj.weight" for part in ("gate", "up")]
            yield from _stacked(
                f"{at}mlp.experts.w13_weight", [(name, (experts, width, every)) for name in names], item_bytes, along=1
            )
            down = [(f"{at}mlp.experts.*.down_proj.weight", (experts, every, width))]
            yield from _stacked(f"{at}mlp.experts.w2_weight", down, item_bytes)
        else:
            names = [f"{at}mlp.{part}_proj.weight" for part in ("gate", "up")]
            yield from _stacked(f"{at}mlp.gate_up_proj.weight", [(name, (width, every)) for name in names], item_bytes)
            yield from one(f"{at}mlp.down_proj.weight", (every, width))


def tensors(decoder: Decoder, dtype: str) -> dict[str, Tensor]:
    """All tensors of the model, with a layer's experts stacked, as a single rank holds them."""
    return {p.tensor: Tensor(tuple(stop for _, stop in p.box), dtype) for p in places(decoder, 0, 1, 1)}


def shapes(decoder: Decoder, ranks: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a rank's parameters, padding included."""
    found: dict[str, tuple[int, ...]] = {}
    for place in places(decoder, 0, ranks, 1):
        size = [stop - start for start, stop in place.box]
        dimension = 1 if place.buffer.endswith("w13_weight") else 0
        if place.buffer in found:
            size[dimension] += found[place.buffer][dimension]
        found[place.buffer] = tuple(size)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in found:
            found[name] = (_padded(decoder.vocab) // ranks, decoder.hidden)
    return found


def _stacked(buffer: str, tensors: Sequence[tuple[str, Box]], item_bytes: int, along: int = 0) -> Iterator[Place]:
    """Boxes of several tensors, concatenated along a dimension of the parameter."""
    extents = [[stop - start for start, stop in box] for _, box in tensors]
    shape = [*extents[0]]
    shape[along] = sum(extent[along] for extent in extents)
    strides = tuple(item_bytes * prod(shape[i + 1 :]) for i in range(len(shape)))
    offset = 0
    for (name, box), extent in zip(tensors, extents):
        yield Place(name, box, buffer, offset, strides)
        offset += extent[along] * strides[along]


def _alone(head: int) -> tuple[int, int]:
    return head, head + 1


def _padded(vocab: int) -> int:
    return -(-vocab // VOCAB_SHARES) * VOCAB_SHARES


def _vocab(vocab: int, rank: int, ranks: int) -> tuple[int, int]:
    share = _padded(vocab) // ranks
    return min(vocab, share * rank), min(vocab, share * (rank + 1))
