"""Whether Megatron-core's ranks can divide a decoder. Knows numbers; loads neither torch nor Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.declare.ranks import RankLayout
from pipeline.errors import Problem
from stages.backends.megatron.names import qkv_rows
from stages.backends.model.decoder import Decoder, Dense, Grouped, Latent, Mixer, Sparse, StateSpace
from stages.model_shape import uneven

_LARGEST_HEAD = 128  # tried with Transformer Engine 2.20.2; larger heads were not


def division_problems(
    decoder: Decoder, layout: RankLayout, expert: int, expert_tensor: int, where: str
) -> Iterator[Problem]:
    """Yield why ranks with this layout cannot divide the decoder. `expert` ranks divide the experts of a mixture, and
    `expert_tensor` each expert."""
    by_tensor, layers = ("tensor_parallel", layout.tensor), len(decoder.layers)
    for part in (*decoder.mixers, *decoder.mlps):
        match part:
            case Grouped():
                yield from uneven(part.heads, "attention heads", *by_tensor, where)
                yield from _key_values(part, layout.tensor, where)
            case Latent():
                yield from uneven(part.heads, "attention heads", *by_tensor, where)
            case StateSpace():
                yield from uneven(part.heads, "Mamba heads", *by_tensor, where)
                yield from uneven(part.groups, "groups of Mamba heads", *by_tensor, where)
            case Dense():
                yield from uneven(part.inner, "intermediate_size", *by_tensor, where)
            case Sparse():
                by_expert_tensor = ("expert_tensor_parallel", expert_tensor)
                yield from uneven(part.inner, "intermediate_size of experts", *by_expert_tensor, where)
                yield from uneven(part.shared, "intermediate_size of shared experts", *by_tensor, where)
                yield from uneven(part.experts, "experts", "expert_parallel", expert, where)
    if layout.pipeline > layers:
        yield Problem(
            where=where,
            what=f"pipeline_parallel={layout.pipeline}, and the model has {layers} layers",
            why="each pipeline stage needs a layer",
            fix=f"pipeline_parallel={layers} or less",
        )
    if layout.context > 1:
        for mixer in decoder.mixers:
            yield from _attention(mixer, layout.context, where)
    if not decoder.experts:
        yield from _no_experts("expert_parallel", expert, 1, where)
        yield from _no_experts("expert_tensor_parallel", expert_tensor, layout.tensor, where)


def _key_values(mixer: Grouped, tensor: int, where: str) -> Iterator[Problem]:
    """Why tensor-parallel ranks cannot share the key-value heads."""
    rows = qkv_rows(mixer)
    if mixer.groups % tensor and tensor % mixer.groups:
        yield Problem(
            where=where,
            what=f"tensor_parallel={tensor}, and the model has {mixer.groups} key-value heads",
            why="each rank computes with whole key-value heads, or equally many ranks share one",
            fix=f"use a divisor or a multiple of {mixer.groups}",
        )
    elif rows % tensor and not mixer.heads % tensor:
        yield Problem(
            where=where,
            what=f"tensor_parallel={tensor} does not divide the {rows} rows of the model's queries, keys and values",
            why="ranks that share a key-value head hold equal parts of its rows and of those of its query heads",
            fix=f"use a divisor of {rows}",
        )


def _attention(mixer: Mixer, context: int, where: str) -> Iterator[Problem]:
    """Why a mixer cannot take a sliced sample."""
    if isinstance(mixer, StateSpace):
        yield Problem(
            where=where,
            what=f"context_parallel={context}, and the model has Mamba layers",
            why="the state of a Mamba layer passes from each position of a sample to the next",
            fix="context_parallel=1, or tensor_parallel, which divides their heads",
        )
        return
    size = mixer.plain + mixer.rotary if isinstance(mixer, Latent) else mixer.head_dim
    if size % 8 or size > _LARGEST_HEAD:
        yield Problem(
            where=where,
            what=f"context_parallel={context}, and the model has heads of size {size}",
            why="Transformer Engine trains packed rows over several ranks with heads whose size is a multiple of 8, at "
            f"most {_LARGEST_HEAD}",
            fix="context_parallel=1, or tensor_parallel, which divides heads",
        )


def _no_experts(by: str, ranks: int, default: int, where: str) -> Iterator[Problem]:
    """Why a dense decoder cannot have a size that divides experts."""
    if ranks != default:
        yield Problem(
            where=where,
            what=f"{by}={ranks}, and the model has no experts",
            why="it divides experts over ranks",
            fix=f"{by}={default}, or a mixture-of-experts model",
        )
