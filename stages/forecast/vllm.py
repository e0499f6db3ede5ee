"""Time and memory of the `vllm` backend: sampling token by token, from a model's shape."""

from __future__ import annotations

from pipeline import Model
from pipeline.declare.work import Decoding, GpuPart, Load
from stages.backends.vllm.limits import share_bytes
from stages.forecast.shape import HALF, Divided, divided

RESIDUE_BYTES = 3.0 * 2**30  # CUDA and its graphs; memory=0.85 minus (awake - asleep) in gpu.step.colocated.h200
BUFFERS_BYTES = 2.0 * 2**30  # activations and logits of the largest step


def decoding(model: Model, load: Load) -> Decoding | None:
    """Return the work of one replica; None for a mixture of experts, whose time was not measured."""
    part = divided(model, load.group)
    if part.shape.experts:
        return None
    read = (part.shape.layer_weights + part.shape.logit_weights) / part.tensor
    saved_bytes = HALF * part.weights - part.size_bytes(load.group.weights)
    return Decoding(
        kind="vllm.sampling",
        weights_bytes=HALF * read - saved_bytes,
        products=2 * read,
        cache_bytes=HALF * _numbers(part),  # an 8-bit cache is read in the same time: gpu.recipe.fp8
        most_tokens=_tokens(part, load),
    )


def cache_bytes(part: Divided, load: Load) -> float:
    """Bytes of keys and values of one token on one GPU."""
    return _numbers(part) * (1 if load.group.cache == "fp8" else HALF)


def _numbers(part: Divided) -> float:
    """Keys and values of one token on one GPU; ranks beyond the key-value heads hold the same heads, and all ranks the
    same latents."""
    if latent := part.shape.latent:
        return float(part.shape.layers * (latent.key_value + latent.rotary))
    heads = -(-part.shape.kv_heads // part.tensor)
    return 2.0 * part.shape.attentions * heads * part.shape.head_dim


def room_of_cache(part: Divided, load: Load) -> float:
    """Bytes that an engine leaves for its cache; negative if it does not fit."""
    share = share_bytes(load.group.memory, load.room_bytes, load.gpu_bytes)
    drafts = HALF * sum(one.weights for one in _draft(load))
    return share - RESIDUE_BYTES - BUFFERS_BYTES - part.size_bytes(load.group.weights) - drafts


def _tokens(part: Divided, load: Load) -> int:
    """The tokens that the cache holds, with those of the draft."""
    return max(0, int(room_of_cache(part, load) / sum(cache_bytes(one, load) for one in (part, *_draft(load)))))


def _draft(load: Load) -> list[Divided]:
    """The model that drafts, if any. It has keys and values of its own for each token."""
    return [] if load.group.draft is None else [divided(load.group.draft, load.group)]


def memory(model: Model, load: Load) -> list[GpuPart]:
    """Return the memory of one rank. It is awake with all that it may take, and keeps little when it sleeps."""
    part = divided(model, load.group)
    cache, tokens = max(0.0, room_of_cache(part, load)), _tokens(part, load)
    return [
        GpuPart(name="CUDA and its graphs", size_bytes=RESIDUE_BYTES),
        GpuPart(name=f"weights of {model.source}", size_bytes=part.size_bytes(load.group.weights), when="moved"),
        *(GpuPart(name="weights of the draft", size_bytes=HALF * one.weights, when="moved") for one in _draft(load)),
        GpuPart(name="buffers", size_bytes=BUFFERS_BYTES, when="dropped"),
        GpuPart(name=f"key-value cache, {tokens:,} tokens", size_bytes=cache, when="dropped"),
    ]
