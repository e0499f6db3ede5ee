"""Translates a decoder into Megatron-core's configuration. Knows numbers and devices; builds nothing."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import relu, silu

from pipeline.errors import StageError
from stages.backends.megatron.division import division_problems
from stages.backends.megatron.fused import Fused
from stages.backends.megatron.groups import Groups
from stages.backends.megatron.parts import stage_layers
from stages.backends.model.decoder import Decoder, Dense, Grouped, Latent, Sparse, StateSpace


def transformer_config(
    decoder: Decoder, groups: Groups, dtype: torch.dtype, where: str, fused: Fused
) -> TransformerConfig:
    """This rank's configuration. Raises StageError if the ranks cannot divide the decoder."""
    divided = division_problems(decoder, groups.layout, groups.expert, groups.expert_tensor, where)
    if problems := list(divided):
        raise StageError(*problems)
    on_cpu = groups.device.type == "cpu"
    made = TransformerConfig(
        num_layers=len(decoder.layers),
        hidden_size=decoder.hidden,
        **_parts(decoder, on_cpu=on_cpu),
        normalization="RMSNorm",
        layernorm_epsilon=decoder.eps,
        gated_linear_unit=decoder.gated,
        activation_func=silu if decoder.gated else squared_relu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.layout.tensor,
        pipeline_model_parallel_size=groups.layout.pipeline,
        context_parallel_size=groups.layout.context,
        pipeline_model_parallel_layout=_stages(len(decoder.layers), groups.layout.pipeline),
        expert_model_parallel_size=groups.expert,
        expert_tensor_parallel_size=groups.expert_tensor,
        sequence_parallel=groups.layout.tensor > 1,  # a mixture requires it; it saves activations in any case
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # the loss is already normalized globally, so gradients are summed
        perform_initialization=False,
        use_cpu_initialization=on_cpu,
        gradient_accumulation_fusion=False,  # Megatron-core's own layers want Apex for it; see Network.sum_in_place
        masked_softmax_fusion=False,
        bias_activation_fusion=fused.activation and decoder.gated,
        bias_dropout_fusion=False,
        apply_rope_fusion=fused.rope,
        persist_layer_norm=False,
    )
    # Megatron-core refuses this with the allgather dispatcher, as lengths may differ; here ranks agree on one.
    made.variable_seq_lengths = True
    return made


def _parts(decoder: Decoder, *, on_cpu: bool) -> dict[str, Any]:
    """Sizes of the parts of layers. Megatron-core has one configuration for all layers, with the sizes of each kind."""
    found: dict[str, Any] = {}
    for part in (*decoder.mixers, *decoder.mlps):
        match part:
            case Grouped():
                found |= {
                    "num_attention_heads": part.heads,
                    "num_query_groups": part.groups,
                    "kv_channels": part.head_dim,
                    "add_qkv_bias": part.bias,
                    "qk_layernorm": part.norm,
                }
            case Latent():
                found |= {"num_attention_heads": part.heads, "kv_channels": part.plain + part.rotary}
            case StateSpace():
                pass  # its module takes the description
            case Dense():
                found |= {"ffn_hidden_size": part.inner}
            case Sparse():
                found |= {
                    "num_moe_experts": part.experts,
                    "moe_ffn_hidden_size": part.inner,
                    "moe_shared_expert_intermediate_size": part.shared or None,
                    "moe_router_topk": part.chosen,
                    # A router of sigmoids does not read it; without it, Megatron-core refuses one expert per token.
                    "moe_router_pre_softmax": part.sigmoid or not part.renormalised,
                    "moe_router_load_balancing_type": "none",
                    "moe_token_dispatcher_type": "allgather" if on_cpu else "alltoall",
                }
    return found


def squared_relu(values: torch.Tensor) -> torch.Tensor:
    """The square of what is positive (arXiv 2109.08668)."""
    return relu(values).square()


def _stages(layers: int, stages: int) -> list[list[str]] | None:
    """What each pipeline stage computes, in Megatron-core's words; None for a single stage."""
    if stages == 1:
        return None
    made = [["decoder"] * len(own) for own in stage_layers(layers, stages)]
    return [["embedding", *made[0]], *made[1:-1], [*made[-1], "loss"]]
