"""Translates a decoder into Megatron-core's configuration. Knows numbers and devices; builds nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu

from pipeline.errors import Problem, StageError
from stages.backends.megatron.groups import Groups
from stages.backends.model.decoder import Decoder


def transformer_config(decoder: Decoder, groups: Groups, dtype: torch.dtype, where: str) -> TransformerConfig:
    """This rank's configuration. Raises StageError if the ranks do not divide the decoder evenly."""
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
            "moe_grouped_gemm": False,
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
        expert_model_parallel_size=groups.expert,
        sequence_parallel=groups.sequence_parallel,
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


def _problems(decoder: Decoder, groups: Groups, where: str) -> Iterator[Problem]:
    layout = groups.layout
    for what, number, by, ranks in (
        ("attention heads", decoder.heads, "tensor_parallel", layout.tensor),
        ("key-value heads", decoder.groups, "tensor_parallel", layout.tensor),
        ("intermediate_size", decoder.intermediate, "tensor_parallel", layout.tensor),
        ("layers", decoder.layers, "pipeline_parallel", layout.pipeline),
        ("experts", decoder.experts, "expert_parallel", groups.expert),
    ):
        if number % ranks:
            yield Problem(
                where=where,
                what=f"{by}={ranks} does not divide the model's {what} ({number})",
                why="all ranks hold equal parts",
                fix=f"a {by} that divides {number}",
            )
    if groups.expert > 1 and not decoder.experts:
        yield Problem(
            where=where,
            what=f"expert_parallel={groups.expert}, and the model has no experts",
            why="it divides experts over ranks",
            fix="expert_parallel=1, or a mixture-of-experts model",
        )
    if decoder.experts and layout.tensor > 1 and not groups.sequence_parallel:
        yield Problem(
            where=where,
            what=f"the model is a mixture of experts, and tensor_parallel={layout.tensor} on the CPU",
            why="tokens are then divided over the tensor-parallel ranks, which needs NCCL",
            fix="tensor_parallel=1 with expert_parallel, or GPUs",
        )
