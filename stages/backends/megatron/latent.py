"""Multi-head latent attention (MLA) of Megatron-core's linear layers. Knows tensors and process groups, no names.

Megatron-core's own class computes positions from the length of a row; here they are given, as rows are packed and share
prompts. The parameters have its names (core/transformer/multi_latent_attention.py).

Legend: S positions (a sequence-parallel rank's share of them outside of attention), N samples, C hidden size, H this
rank's heads, D size of a head's query or key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from stages.backends.megatron.rotary import turned
from stages.backends.model.decoder import Latent, Rope, Yarn


class Replicated(torch.nn.Linear):
    """A matrix that each rank holds whole, applied to its share of the positions."""

    def __init__(self, config: TransformerConfig, size: int, outputs: int) -> None:
        super().__init__(size, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] # gradients are summed


@dataclass(frozen=True)
class LatentParts:
    """The classes that it is built from: matrices whose rows or columns ranks divide, norm, and attention itself."""

    rows: Any
    columns: Any
    norm: Any
    core_attention: Any


class LatentAttention(MegatronModule):
    """The `self_attention` of a layer."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentParts,
        layer_number: int,
        *,
        shape: Latent,
        rope: Rope,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.shape, self.group = shape, pg_collection.tp
        self.amplitude = rope.scaling.amplitude if isinstance(rope.scaling, Yarn) else 1.0
        query_D, hidden = shape.plain + shape.rotary, config.hidden_size
        given: Any = {"config": config, "bias": False, "init_method": None, "is_expert": False, "tp_group": self.group}

        def divided(name: str, size: int, outputs: int) -> Any:
            return submodules.rows(
                size, outputs, **given, gather_output=False, skip_bias_add=False, tp_comm_buffer_name=name
            )

        if shape.query:
            self.linear_q_down_proj = Replicated(config, hidden, shape.query)
            self.q_layernorm = submodules.norm(config=config, hidden_size=shape.query, eps=config.layernorm_epsilon)
            self.linear_q_up_proj = divided("q_up_proj", shape.query, shape.heads * query_D)
        else:
            self.linear_q_proj = divided("q_proj", hidden, shape.heads * query_D)
        self.linear_kv_down_proj = Replicated(config, hidden, shape.key_value + shape.rotary)
        self.kv_layernorm = submodules.norm(config=config, hidden_size=shape.key_value, eps=config.layernorm_epsilon)
        self.linear_kv_up_proj = divided("kv_up_proj", shape.key_value, shape.heads * (shape.plain + shape.value))
        self.core_attention = submodules.core_attention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=shape.sharpness / math.sqrt(query_D),
            k_channels=query_D,
            v_channels=shape.value,
            cp_comm_type=None,
            pg_collection=pg_collection,
        )
        self.linear_proj = submodules.columns(
            shape.heads * shape.value,
            hidden,
            **given,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
        )

    def forward(
        self,
        hidden_SNC: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns [S, N, C] and no bias. `rotary_pos_emb` has the angles of all positions, [S, 1, 1, rotary]."""
        shape = self.shape
        angles: Any = {"amplitude": self.amplitude, "interleaved": shape.interleaved}
        latent, key = self.linear_kv_down_proj(hidden_SNC).split([shape.key_value, shape.rotary], dim=-1)
        if self.config.sequence_parallel:
            key = gather_from_sequence_parallel_region(key, group=self.group)
        key_SN1D = turned(key[:, :, None], rotary_pos_emb, **angles)
        query_SNHD = self._heads(self._queries(hidden_SNC), shape.plain + shape.rotary)
        plain, rotary = query_SNHD.split([shape.plain, shape.rotary], dim=-1)
        query_SNHD = torch.cat([plain, turned(rotary, rotary_pos_emb, **angles)], dim=-1)
        both, _bias = self.linear_kv_up_proj(self.kv_layernorm(latent))
        plain, value = self._heads(both, shape.plain + shape.value).split([shape.plain, shape.value], dim=-1)
        key_SNHD = torch.cat([plain, key_SN1D.expand(-1, -1, plain.shape[2], -1)], dim=-1)
        made = self.core_attention(
            query_SNHD, key_SNHD, value.contiguous(), attention_mask, packed_seq_params=packed_seq_params
        )
        output: tuple[torch.Tensor, torch.Tensor | None] = self.linear_proj(made)
        return output

    def _queries(self, hidden_SNC: torch.Tensor) -> torch.Tensor:
        """Queries of all positions, heads and their dimensions flattened."""
        if not self.shape.query:
            made: torch.Tensor = self.linear_q_proj(hidden_SNC)[0]
            return made
        made = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_SNC)))[0]
        return made

    @staticmethod
    def _heads(values: torch.Tensor, size: int) -> torch.Tensor:
        return values.unflatten(-1, (-1, size))
