"""A mixture whose experts compute in a smaller space (LatentMoE, arXiv 2601.18089), without Transformer Engine, which
Megatron-core requires for it. The parameters have its names (core/transformer/moe/moe_layer.py).

Legend: S positions, N samples, H hidden size, L size of the space of the experts.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module


class Projection(torch.nn.Linear):
    """A matrix that every tensor-parallel rank has whole. Megatron-core sums its gradient over those that have a part
    of the positions each."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(inputs, outputs, bias=False, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentMixture(MoELayer):
    """Routes hidden states, and projects them to `latent` numbers before experts and back after these. The shared
    expert has hidden states."""

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, *, latent: int, **given: Any) -> None:
        inside = copy(config)
        inside.moe_latent_size = latent  # the width of experts; the base class asks the other one whether to project
        experts = ModuleSpec(module=_Inside, params={"spec": submodules.experts, "inside": inside})
        super().__init__(config, replace(submodules, experts=experts), **given)
        self.fc1_latent_proj = Projection(config.hidden_size, latent, config)
        self.fc2_latent_proj = Projection(latent, config.hidden_size, config)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project hidden states [S, N, H], and prepare them for the experts' ranks."""
        return super().preprocess(self.fc1_latent_proj(hidden_states), probs, routing_map)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Project what experts made back to [S, N, H], and add the shared expert's."""
        hidden_SNH = self.fc2_latent_proj(super().postprocess(output, None))
        return hidden_SNH if shared_expert_output is None else hidden_SNH + shared_expert_output


class _Inside:
    """Builds experts with the configuration of what is inside the projections."""

    def __new__(cls, number: int, config: TransformerConfig, *, spec: Any, inside: Any, **given: Any) -> Any:
        return build_module(spec, number, inside, **given)
