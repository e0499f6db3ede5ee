"""Whether Megatron-core's ranks can divide a decoder. Knows numbers; loads neither torch nor Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import Problem
from stages.backends.megatron.names import qkv_rows
from stages.backends.model.decoder import Decoder

_LARGEST_HEAD = 128  # tried with Transformer Engine 2.20.2; larger heads were not


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Over how many ranks each part of a model is divided."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int


def division_problems(decoder: Decoder, sizes: Sizes, where: str) -> Iterator[Problem]:
    """Yield why ranks of these sizes cannot divide the decoder."""
    yield from _uneven(decoder, sizes, where)
    yield from _key_values(decoder, sizes.tensor, where)
    if sizes.pipeline > decoder.layers:
        yield Problem(
            where=where,
            what=f"pipeline_parallel={sizes.pipeline}, and the model has {decoder.layers} layers",
            why="each pipeline stage needs a layer",
            fix=f"pipeline_parallel={decoder.layers} or less",
        )
    if sizes.context > 1:
        yield from _attention(decoder, sizes.context, where)
    if not decoder.experts:
        yield from _no_experts(sizes, where)


def _uneven(decoder: Decoder, sizes: Sizes, where: str) -> Iterator[Problem]:
    """Whatever ranks must divide evenly, and do not."""
    tensor = ("tensor_parallel", sizes.tensor)
    of_mlp = ("expert_tensor_parallel", sizes.expert_tensor) if decoder.experts else tensor
    for what, number, by, ranks in (
        ("attention heads", decoder.heads, *tensor),
        ("intermediate_size", decoder.intermediate, *of_mlp),
        ("experts", decoder.experts, "expert_parallel", sizes.expert),
    ):
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


def _no_experts(sizes: Sizes, where: str) -> Iterator[Problem]:
    """Sizes that divide experts."""
    for by, ranks, default in (
        ("expert_parallel", sizes.expert, 1),
        ("expert_tensor_parallel", sizes.expert_tensor, sizes.tensor),
    ):
        if ranks != default:
            yield Problem(
                where=where,
                what=f"{by}={ranks}, and the model has no experts",
                why="it divides experts over ranks",
                fix=f"{by}={default}, or a mixture-of-experts model",
            )
