"""Whether Megatron-core's ranks can divide a decoder. Knows numbers; loads neither torch nor Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.declare.ranks import RankLayout
from pipeline.errors import Problem
from stages.backends.megatron.names import qkv_rows
from stages.backends.model.decoder import Decoder

_LARGEST_HEAD = 128  # tried with Transformer Engine 2.20.2; larger heads were not


def division_problems(
    decoder: Decoder, layout: RankLayout, expert: int, expert_tensor: int, where: str
) -> Iterator[Problem]:
    """Yield why ranks with this layout cannot divide the decoder. `expert` ranks divide the experts of a mixture, and
    `expert_tensor` each expert."""
    of_mlp = ("expert_tensor_parallel", expert_tensor) if decoder.experts else ("tensor_parallel", layout.tensor)
    yield from _uneven(decoder.heads, "attention heads", "tensor_parallel", layout.tensor, where)
    yield from _uneven(decoder.intermediate, "intermediate_size", *of_mlp, where)
    yield from _uneven(decoder.experts, "experts", "expert_parallel", expert, where)
    yield from _key_values(decoder, layout.tensor, where)
    if layout.pipeline > decoder.layers:
        yield Problem(
            where=where,
            what=f"pipeline_parallel={layout.pipeline}, and the model has {decoder.layers} layers",
            why="each pipeline stage needs a layer",
            fix=f"pipeline_parallel={decoder.layers} or less",
        )
    if layout.context > 1:
        yield from _attention(decoder, layout.context, where)
    if not decoder.experts:
        yield from _no_experts("expert_parallel", expert, 1, where)
        yield from _no_experts("expert_tensor_parallel", expert_tensor, layout.tensor, where)


def _uneven(number: int, what: str, by: str, ranks: int, where: str) -> Iterator[Problem]:
    """Why ranks cannot divide this number of parts evenly."""
    if number % ranks:
        yield Problem(
            where=where,
            what=f"{by}={ranks} does not divide the model's {what} ({number})",
            why="all ranks hold equal parts",
            fix=f"use a divisor of {number}",
        )


def _key_values(decoder: Decoder, tensor: int, where: str) -> Iterator[Problem]:
    """Why tensor-parallel ranks cannot share the key-value heads."""
    rows = qkv_rows(decoder)
    if decoder.groups % tensor and tensor % decoder.groups:
        yield Problem(
            where=where,
            what=f"tensor_parallel={tensor}, and the model has {decoder.groups} key-value heads",
            why="each rank computes with whole key-value heads, or equally many ranks share one",
            fix=f"use a divisor or a multiple of {decoder.groups}",
        )
    elif rows % tensor and not decoder.heads % tensor:
        yield Problem(
            where=where,
            what=f"tensor_parallel={tensor} does not divide the {rows} rows of the model's queries, keys and values",
            why="ranks that share a key-value head hold equal parts of its rows and of those of its query heads",
            fix=f"use a divisor of {rows}",
        )


def _attention(decoder: Decoder, context: int, where: str) -> Iterator[Problem]:
    """Why Transformer Engine's attention cannot take the heads of a sliced sample."""
    if decoder.head_dim % 8 or decoder.head_dim > _LARGEST_HEAD:
        yield Problem(
            where=where,
            what=f"context_parallel={context}, and the model has heads of size {decoder.head_dim}",
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
