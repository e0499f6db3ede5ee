"""Translates a decoder into Megatron-core's configuration. Knows numbers and devices; builds nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu

from pipeline.errors import Problem, StageError
from stages.backends.megatron.groups import Groups
from stages.backends.megatron.names import qkv_rows
from stages.backends.megatron.parts import stage_layers
from stages.backends.model.decoder import Decoder

_LARGEST_HEAD = 128  # tried with Transformer Engine 2.20.2; larger heads were not


def transformer_config(decoder: Decoder, groups: Groups, dtype: torch.dtype, where: str) -> TransformerConfig:
    """This rank's configuration. Raises StageError if the ranks cannot divide the decoder."""
    if problems := list(_problems(decoder, groups, where)):
        raise StageError(*problems)
    on_cpu = groups.device.type == "cpu"
    mixture = (
        {
            "num_moe_experts": decoder.experts,
            "moe_ffn_hidden_size": decoder.intermediate,
            "moe_router_topk": decoder.chosen,
            "moe_router_pre_softmax": not decoder.renormalise,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather" if on_cpu else "alltoall",
        }
        if decoder.experts
        else {}
    )
    made = TransformerConfig(
        num_layers=decoder.layers,
        hidden_size=decoder.hidden,
        num_attention_heads=decoder.heads,
        num_query_groups=decoder.groups,
        kv_channels=decoder.head_dim,
        ffn_hidden_size=decoder.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=decoder.eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=decoder.qkv_bias,
        qk_layernorm=decoder.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.layout.tensor,
        pipeline_model_parallel_size=groups.layout.pipeline,
        context_parallel_size=groups.layout.context,
        pipeline_model_parallel_layout=_stages(decoder.layers, groups.layout.pipeline),
        expert_model_parallel_size=groups.expert,
        expert_tensor_parallel_size=groups.expert_tensor,
        sequence_parallel=groups.layout.tensor > 1,  # a mixture requires it; it saves activations in any case
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # the loss is already normalized globally, so gradients are summed
        perform_initialization=False,
        use_cpu_initialization=on_cpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **mixture,
    )
    # Megatron-core refuses this with the allgather dispatcher, as lengths may differ; here ranks agree on one.
    made.variable_seq_lengths = True
    return made


def _stages(layers: int, stages: int) -> list[list[str]] | None:
    """What each pipeline stage computes, in Megatron-core's words; None for a single stage."""
    if stages == 1:
        return None
    made = [["decoder"] * len(own) for own in stage_layers(layers, stages)]
    return [["embedding", *made[0]], *made[1:-1], [*made[-1], "loss"]]


def _problems(decoder: Decoder, groups: Groups, where: str) -> Iterator[Problem]:
    yield from _uneven(decoder, groups, where)
    yield from _key_values(decoder, groups.layout.tensor, where)
    if groups.layout.pipeline > decoder.layers:
        yield Problem(
            where=where,
            what=f"pipeline_parallel={groups.layout.pipeline}, and the model has {decoder.layers} layers",
            why="each pipeline stage needs a layer",
            fix=f"pipeline_parallel={decoder.layers} or less",
        )
    if groups.layout.context > 1:
        yield from _attention(decoder, groups.layout.context, where)
    if not decoder.experts:
        yield from _no_experts(groups, where)


def _uneven(decoder: Decoder, groups: Groups, where: str) -> Iterator[Problem]:
    """Whatever ranks must divide evenly, and do not."""
    tensor = ("tensor_parallel", groups.layout.tensor)
    of_mlp = ("expert_tensor_parallel", groups.expert_tensor) if decoder.experts else tensor
    for what, number, by, ranks in (
        ("attention heads", decoder.heads, *tensor),
        ("intermediate_size", decoder.intermediate, *of_mlp),
        ("experts", decoder.experts, "expert_parallel", groups.expert),
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


def _no_experts(groups: Groups, where: str) -> Iterator[Problem]:
    """Sizes that divide experts."""
    for by, ranks, default in (
        ("expert_parallel", groups.expert, 1),
        ("expert_tensor_parallel", groups.expert_tensor, groups.layout.tensor),
    ):
        if ranks != default:
            yield Problem(
                where=where,
                what=f"{by}={ranks}, and the model has no experts",
                why="it divides experts over ranks",
                fix=f"{by}={default}, or a mixture-of-experts model",
            )
