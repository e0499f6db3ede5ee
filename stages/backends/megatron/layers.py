"""The modules of each kind of layer, as Megatron-core builds them. Knows kinds of parts, not names or weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint

from stages.backends.megatron.attention import CausalAttention, EngineAttention, SlicedAttention
from stages.backends.megatron.fused import Fused
from stages.backends.megatron.latent import LatentAttention, LatentParts
from stages.backends.megatron.latent_mixture import LatentMixture
from stages.backends.megatron.parts import Part, stage_layers
from stages.backends.megatron.router import ReplayingRouter, Router, SigmoidRouter
from stages.backends.megatron.state_space import StateSpaceMixer
from stages.backends.model.decoder import Decoder, Grouped, Latent, Layer, Sparse, StateSpace


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose gradient Megatron-core sums over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RecomputableLayer(TransformerLayer):
    """A layer that can drop its activations, or those of its feed-forward part, and recompute them."""

    recomputes = False

    def forward(self, *given: Any, **named: Any) -> Any:
        """Like the base class."""
        if self.recomputes and torch.is_grad_enabled():
            return self._dropped(super().forward, *given, **named)
        return super().forward(*given, **named)

    def recompute_feed_forward(self) -> None:
        """From now on, keep of the feed-forward part its input only. A layer without one keeps what it kept."""
        if isinstance(self.mlp, IdentityOp):
            return
        compute = self.mlp.forward

        def forward(*given: Any, **named: Any) -> Any:
            return self._dropped(compute, *given, **named) if torch.is_grad_enabled() else compute(*given, **named)

        self.mlp.forward = forward

    @property
    def router(self) -> ReplayingRouter | None:
        """The router of its mixture of experts."""
        return getattr(self.mlp, "router", None)

    def _dropped(self, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What `compute` returns. Its activations are dropped, and recomputed in the backward pass with the experts of
        this pass: other passes may have begun meanwhile."""
        experts = self.router.given_TK if self.router else None

        def again(*given: Any, **named: Any) -> Any:
            if self.router:
                self.router.given_TK = experts
            return compute(*given, **named)

        return checkpoint(again, *given, use_reentrant=False, preserve_rng_state=False, **named)  # there is no dropout


def block(decoder: Decoder, config: TransformerConfig, part: Part, fused: Fused) -> TransformerBlockSubmodules:
    """The module specification of one stage's layers."""
    whole_samples = EngineAttention if fused.attention else CausalAttention
    attention = SlicedAttention if config.context_parallel_size > 1 else whole_samples
    specs = {layer: _layer(layer, decoder, part, attention, fused) for layer in dict.fromkeys(decoder.layers)}
    mine = stage_layers(len(decoder.layers), part.stages)[part.stage]
    return TransformerBlockSubmodules(layer_specs=[specs[decoder.layers[i]] for i in mine], layer_norm=_norm(part))


def _layer(layer: Layer, decoder: Decoder, part: Part, attention: type, fused: Fused) -> ModuleSpec:
    experts = layer.mlp.experts if isinstance(layer.mlp, Sparse) else None
    has_norm = isinstance(layer.mixer, Grouped) and layer.mixer.norm
    norm = _norm(part)
    if part.fused_norms:
        layer_spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=part.grouped_experts, qk_layernorm=has_norm
        )
    else:
        layer_spec = get_gpt_layer_local_spec(
            num_experts=experts, moe_grouped_gemm=False, qk_layernorm=has_norm, normalization="RMSNorm"
        )
        layer_spec.submodules.input_layernorm = layer_spec.submodules.pre_mlp_layernorm = norm
    parts = layer_spec.submodules
    if layer.mixer is None:
        parts.input_layernorm = parts.self_attention = IdentityOp
        parts.self_attn_bda = IdentityFuncOp
    elif isinstance(layer.mixer, StateSpace):
        parts.input_layernorm = norm
        parts.self_attention = ModuleSpec(
            module=StateSpaceMixer, params={"shape": layer.mixer, "linear": _linear(part), "scan": fused.scan}
        )
    elif isinstance(layer.mixer, Latent):
        parts.input_layernorm = norm
        parts.self_attention = ModuleSpec(
            module=LatentAttention,
            params={"shape": layer.mixer, "rope": decoder.rope},
            submodules=LatentParts(*_linear(part), norm, attention),
        )
    else:
        inside = parts.self_attention.submodules
        inside.core_attention = attention
        if has_norm and not part.fused_norms:
            inside.q_layernorm = inside.k_layernorm = norm
    if layer.mlp is None:
        parts.pre_mlp_layernorm = parts.mlp = IdentityOp
        parts.mlp_bda = IdentityFuncOp
    elif isinstance(layer.mlp, Sparse):
        softmax = ReplayingRouter if part.fused_norms else Router
        parts.mlp.submodules.router = partial(SigmoidRouter, layer.mlp) if layer.mlp.sigmoid else softmax
        if layer.mlp.latent:
            parts.mlp = replace(parts.mlp, module=LatentMixture, params={"latent": layer.mlp.latent})
    return ModuleSpec(module=RecomputableLayer, params=layer_spec.params, submodules=parts)


def _norm(part: Part) -> Any:
    """The class of norms that are not inside a linear layer."""
    if not part.fused_norms:
        return Norm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _linear(part: Part) -> tuple[Any, Any]:
    """The classes of matrices whose rows, and whose columns, tensor-parallel ranks divide."""
    if not part.fused_norms:
        return ColumnParallelLinear, RowParallelLinear
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    return TEColumnParallelLinear, TERowParallelLinear
