"""Causal attention over rectangles, packed rows and slices of packed rows, for Megatron-core's layers. Knows no model.

In a row whose samples share prompts, each section attends to the keys of its prefix and to its own. They are gathered
first, so that the kernels are those of other rows: queries are the last positions of longer sequences.

Legend: S positions, N samples (1 for a packed row), H query heads, G key-value heads, D head size, K keys of all
sections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from stages.backends.megatron.copies import gathered, with_copies
from stages.backends.megatron.microbatches import SharedRow


class _LastKeys(Enum):
    """Queries are those of the last keys. Transformer Engine has this mask; Megatron-core passes its name on, but lacks
    a member for it."""

    padding_causal_bottom_right = 1


class CausalAttention(MegatronModule):
    """The `core_attention` of a layer. A packed row's samples attend only to themselves; no S x S tensor is kept.

    The row is not in Megatron-core's packed format, so that rotary embeddings are looked up by position instead of
    sample by sample; `packed_seq_params` holds the starts of its samples.
    """

    recomputed = False  # whether its layer keeps only its input

    def __init__(self, config: TransformerConfig, **given: Any) -> None:
        super().__init__(config=config)
        self.scale = given.get("softmax_scale")

    def forward(
        self,
        query_SNHD: torch.Tensor,
        key_SNGD: torch.Tensor,
        value_SNGD: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Returns [S, N, H * D]. The mask is always causal."""
        if packed_seq_params is None:
            return self._causal(query_SNHD, key_SNGD, value_SNGD).flatten(-2)
        if query_SNHD.is_cuda and query_SNHD.dtype in (torch.bfloat16, torch.float16):
            return self._packed(query_SNHD, key_SNGD, value_SNGD, packed_seq_params).flatten(-2)
        if isinstance(packed_seq_params, SharedRow):
            key_SNGD, value_SNGD = (gathered(each, packed_seq_params.keys_K) for each in (key_SNGD, value_SNGD))
        queries, keys = (
            starts.diff().tolist() for starts in (packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv)
        )
        parts = zip(query_SNHD.split(queries), key_SNGD.split(keys), value_SNGD.split(keys))
        return torch.cat([self._causal(*part) for part in parts]).flatten(-2)

    def _causal(self, query_SNHD: torch.Tensor, key_KNGD: torch.Tensor, value_KNGD: torch.Tensor) -> torch.Tensor:
        """The queries are those of the last keys."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SNHD, key_KNGD, value_KNGD))
        seen: Any = {"is_causal": True}
        if earlier := len(key_KNGD) - len(query_SNHD):
            mask_SK = torch.ones(len(query_SNHD), len(key_KNGD), dtype=torch.bool, device=query.device).tril(earlier)
            seen = {"attn_mask": mask_SK}
        made = scaled_dot_product_attention(query, key, value, scale=self.scale, enable_gqa=True, **seen)
        return made.permute(2, 0, 1, 3)

    def _packed(
        self, query_S1HD: torch.Tensor, key_S1GD: torch.Tensor, value_S1GD: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        """One kernel over all samples of the row; it needs as many key-value heads as query heads."""
        repeat, size = query_S1HD.shape[2] // key_S1GD.shape[2], value_S1GD.shape[-1]
        if size < key_S1GD.shape[-1]:  # the kernel has one size for keys and values
            value_S1GD = pad(value_S1GD, (0, key_S1GD.shape[-1] - size))

        def attend(key_KHD: torch.Tensor, value_KHD: torch.Tensor) -> torch.Tensor:
            made_SHD: Any = varlen_attn(
                query_S1HD[:, 0],
                key_KHD,
                value_KHD,
                packed.cu_seqlens_q,
                packed.cu_seqlens_kv,
                packed.max_seqlen_q,
                packed.max_seqlen_kv,
                scale=self.scale,
                window_size=(-1, 0),  # causal; the last query is that of the last key
            )
            return made_SHD[:, None]

        key_SHD, value_SHD = (each[:, 0].repeat_interleave(repeat, 1) for each in (key_S1GD, value_S1GD))
        return self._by_kernel(attend, key_SHD, value_SHD, packed)[..., :size]

    def _by_kernel(
        self,
        attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        key_SGD: torch.Tensor,
        value_SGD: torch.Tensor,
        packed: PackedSeqParams,
    ) -> torch.Tensor:
        """`attend` with the keys and values of all sections. In a recomputed layer nothing is kept anyway."""
        if isinstance(packed, SharedRow):
            return with_copies(attend, key_SGD, value_SGD, packed.keys_K, keep=self.recomputed)
        return attend(key_SGD, value_SGD)


class EngineAttention(CausalAttention):
    """`CausalAttention` with Transformer Engine's kernel over packed rows, which groups query heads itself."""

    def __init__(self, config: TransformerConfig, **given: Any) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__(config, **given)
        self.engine = TEDotProductAttention(config, **given)

    def _packed(
        self, query_S1HD: torch.Tensor, key_S1GD: torch.Tensor, value_S1GD: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        def attend(key_KGD: torch.Tensor, value_KGD: torch.Tensor) -> torch.Tensor:
            return _by_engine(self.engine, query_S1HD[:, 0], key_KGD, value_KGD, packed)

        return self._by_kernel(attend, key_S1GD[:, 0], value_S1GD[:, 0], packed)


class SlicedAttention(MegatronModule):
    """The `core_attention` of a layer whose context-parallel ranks each hold a slice of every sample (slices.py).

    It is Transformer Engine's, which passes keys and values around these ranks.
    """

    def __init__(self, config: TransformerConfig, **given: Any) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__(config=config)
        self.around = TEDotProductAttention(config, **given)

    def forward(
        self,
        query_S1HD: torch.Tensor,
        key_S1GD: torch.Tensor,
        value_S1GD: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams,
    ) -> torch.Tensor:
        """Returns [S, 1, H * D], S being this rank's positions. The mask is always causal."""
        inputs = (query_S1HD[:, 0], key_S1GD[:, 0], value_S1GD[:, 0])
        return _by_engine(self.around, *inputs, packed_seq_params).flatten(-2)


def _by_engine(
    attention: Any, query_SHD: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor, packed: PackedSeqParams
) -> torch.Tensor:
    """Returns [S, 1, H, D] of Transformer Engine's attention over a packed row, or this rank's slice of it."""
    made = attention(
        query_SHD,
        key_KGD,
        value_KGD,
        None,
        _LastKeys.padding_causal_bottom_right if isinstance(packed, SharedRow) else AttnMaskType.padding_causal,
        packed_seq_params=replace(packed, qkv_format="thd"),
    )
    return made.reshape(len(made), 1, query_SHD.shape[1], -1)  # values may have another size
