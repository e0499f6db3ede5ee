"""The table of names: which Hugging Face tensors each parameter of Megatron-core's layers consists of. Data only.

A part of a layer (stages/backends/model/decoder.py) has the rules of its kind in `PARTS`; `names.py` follows them.
Megatron-core lays out tensors in six ways, see `Kind`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stages.backends.model.decoder import Decoder, Dense, Grouped, Latent, Sparse, StateSpace

Kind = Literal["whole", "rows", "columns", "sections", "stacked", "grouped"]
# whole    the whole tensor, on every tensor-parallel rank
# rows     a range of its rows
# columns  a range of its columns
# sections a range of rows from each of several sections of it
# stacked  a range of rows from each of several tensors, stacked: gate and up of SwiGLU
# grouped  a range of rows from queries, keys and values, interleaved: for each key-value head its query heads, its key
#          and its value. With more ranks than key-value heads, several ranks hold rows of one, and none holds them all:
#          Megatron-core gathers their products (core/transformer/attention.py, get_query_key_value_tensors)
DIVIDED: Mapping[Kind, int | None] = {
    "whole": None,
    "rows": 0,
    "columns": 1,
    "sections": 0,
    "stacked": 0,
    "grouped": 0,
}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class NameRule:
    """A Megatron-core parameter and the Hugging Face tensors that it consists of. On the left, {layer} and {expert}
    count within the rank; on the right, within the model.

    shape   of one of the tensors, from the hidden size and the description of the part of a layer that has them; of
            grouped ones, which differ, without the number of rows
    when    whether a part has them
    sections   the rows of each section
    """

    parameter: str
    kind: Kind
    tensors: tuple[str, ...]
    shape: Callable[[int, Any], Shape]
    when: Callable[[Any], bool] = lambda part: True
    sections: Callable[[Any], tuple[int, ...]] = lambda part: ()


LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_MLP, _HF_MLP = LAYER + "mlp.", _HF + "mlp."
_EXPERT, _HF_EXPERT = _MLP + "experts.local_experts.{expert}.", _HF_MLP + "experts.{expert}."
_SHARED, _HF_SHARED = _MLP + "shared_experts.", _HF_MLP + "shared_experts."
_ATTENTION, _HF_ATTENTION = LAYER + "self_attention.", _HF + "self_attn."
_STATE, _HF_STATE = LAYER + "self_attention.", _HF + "mixer."


def _hidden(hidden: int, part: Any) -> Shape:
    return (hidden,)


def _vocabulary(hidden: int, decoder: Decoder) -> Shape:
    return (decoder.vocab, hidden)


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"{_HF_ATTENTION}{letter}_proj.{kind}" for letter in "qkv")


def _feed_forward(
    here: str,
    there: str,
    inner: Callable[[Any], int],
    when: Callable[[Any], bool] = lambda part: True,
    outer: Callable[[int, Any], int] = lambda hidden, part: hidden,
) -> tuple[NameRule, ...]:
    """The rules of a feed-forward layer of an inner size; `outer` is that of its inputs and outputs."""
    gate, up = (there + "gate_proj.weight", there + "up_proj.weight")

    def shape(hidden: int, part: Any) -> Shape:
        return (inner(part), outer(hidden, part))

    return (
        NameRule(here + "linear_fc1.weight", "stacked", (gate, up), shape, lambda part: when(part) and part.gated),
        NameRule(here + "linear_fc1.weight", "rows", (up,), shape, lambda part: when(part) and not part.gated),
        NameRule(
            here + "linear_fc2.weight",
            "columns",
            (there + "down_proj.weight",),
            lambda hidden, part: (outer(hidden, part), inner(part)),
            when,
        ),
    )


FIRST = (NameRule("embedding.word_embeddings.weight", "rows", ("model.embed_tokens.weight",), _vocabulary),)
LAST = (
    NameRule("decoder.final_layernorm.weight", "whole", ("model.norm.weight",), _hidden),
    NameRule("output_layer.weight", "rows", ("lm_head.weight",), _vocabulary, lambda decoder: not decoder.tied),
)
TIED = NameRule(  # if the first stage is on another rank
    "output_layer.weight", "rows", ("model.embed_tokens.weight",), _vocabulary
)
BEFORE_MIXER = NameRule(LAYER + "input_layernorm.weight", "whole", (_HF + "input_layernorm.weight",), _hidden)
BEFORE_MLP = NameRule(LAYER + "pre_mlp_layernorm.weight", "whole", (_HF + "post_attention_layernorm.weight",), _hidden)
PARTS: Mapping[type, tuple[NameRule, ...]] = {  # by the kind of a part of a layer
    Grouped: (
        NameRule(_ATTENTION + "linear_qkv.weight", "grouped", _qkv("weight"), _hidden),
        NameRule(_ATTENTION + "linear_qkv.bias", "grouped", _qkv("bias"), lambda *_: (), lambda part: part.bias),
        *(
            NameRule(
                f"{_ATTENTION}{letter}_layernorm.weight",
                "whole",
                (f"{_HF_ATTENTION}{letter}_norm.weight",),
                lambda _, part: (part.head_dim,),
                lambda part: part.norm,
            )
            for letter in "qk"
        ),
        NameRule(
            _ATTENTION + "linear_proj.weight",
            "columns",
            (_HF_ATTENTION + "o_proj.weight",),
            lambda hidden, part: (hidden, part.heads * part.head_dim),
        ),
    ),
    Latent: (
        NameRule(
            _ATTENTION + "linear_q_proj.weight",
            "rows",
            (_HF_ATTENTION + "q_proj.weight",),
            lambda hidden, part: (part.heads * (part.plain + part.rotary), hidden),
            lambda part: not part.query,
        ),
        NameRule(
            _ATTENTION + "linear_q_down_proj.weight",
            "whole",
            (_HF_ATTENTION + "q_a_proj.weight",),
            lambda hidden, part: (part.query, hidden),
            lambda part: part.query,
        ),
        NameRule(
            _ATTENTION + "q_layernorm.weight",
            "whole",
            (_HF_ATTENTION + "q_a_layernorm.weight",),
            lambda _, part: (part.query,),
            lambda part: part.query,
        ),
        NameRule(
            _ATTENTION + "linear_q_up_proj.weight",
            "rows",
            (_HF_ATTENTION + "q_b_proj.weight",),
            lambda _, part: (part.heads * (part.plain + part.rotary), part.query),
            lambda part: part.query,
        ),
        NameRule(
            _ATTENTION + "linear_kv_down_proj.weight",
            "whole",
            (_HF_ATTENTION + "kv_a_proj_with_mqa.weight",),
            lambda hidden, part: (part.key_value + part.rotary, hidden),
        ),
        NameRule(
            _ATTENTION + "kv_layernorm.weight",
            "whole",
            (_HF_ATTENTION + "kv_a_layernorm.weight",),
            lambda _, part: (part.key_value,),
        ),
        NameRule(
            _ATTENTION + "linear_kv_up_proj.weight",
            "rows",
            (_HF_ATTENTION + "kv_b_proj.weight",),
            lambda _, part: (part.heads * (part.plain + part.value), part.key_value),
        ),
        NameRule(
            _ATTENTION + "linear_proj.weight",
            "columns",
            (_HF_ATTENTION + "o_proj.weight",),
            lambda hidden, part: (hidden, part.heads * part.value),
        ),
    ),
    StateSpace: (
        NameRule(
            _STATE + "in_proj.weight",
            "sections",
            (_HF_STATE + "in_proj.weight",),
            lambda hidden, part: (sum(part.projected), hidden),
            sections=lambda part: part.projected,
        ),
        NameRule(
            _STATE + "conv1d.weight",
            "sections",
            (_HF_STATE + "conv1d.weight",),
            lambda _, part: (sum(part.convolved), 1, part.kernel),
            sections=lambda part: part.convolved,
        ),
        NameRule(
            _STATE + "conv1d.bias",
            "sections",
            (_HF_STATE + "conv1d.bias",),
            lambda _, part: (sum(part.convolved),),
            lambda part: part.bias,
            sections=lambda part: part.convolved,
        ),
        *(
            NameRule(_STATE + name, "rows", (_HF_STATE + name,), lambda _, part: (part.heads,))
            for name in ("A_log", "D", "dt_bias")
        ),
        NameRule(_STATE + "norm.weight", "rows", (_HF_STATE + "norm.weight",), lambda _, part: (part.inner,)),
        NameRule(
            _STATE + "out_proj.weight",
            "columns",
            (_HF_STATE + "out_proj.weight",),
            lambda hidden, part: (hidden, part.inner),
        ),
    ),
    Dense: _feed_forward(_MLP, _HF_MLP, lambda part: part.inner),
    Sparse: (
        NameRule(
            _MLP + "router.weight",
            "whole",
            (_HF_MLP + "gate.weight",),
            lambda hidden, part: (part.experts, hidden),
        ),
        NameRule(
            _MLP + "router.expert_bias",
            "whole",
            (_HF_MLP + "gate.e_score_correction_bias",),
            lambda _, part: (part.experts,),
            lambda part: part.sigmoid,
        ),
        NameRule(
            _MLP + "fc1_latent_proj.weight",
            "whole",
            (_HF_MLP + "fc1_latent_proj.weight",),
            lambda hidden, part: (part.latent, hidden),
            lambda part: part.latent,
        ),
        NameRule(
            _MLP + "fc2_latent_proj.weight",
            "whole",
            (_HF_MLP + "fc2_latent_proj.weight",),
            lambda hidden, part: (hidden, part.latent),
            lambda part: part.latent,
        ),
        *_feed_forward(_SHARED, _HF_SHARED, lambda part: part.shared, lambda part: part.shared),
        *_feed_forward(  # for each expert
            _EXPERT, _HF_EXPERT, lambda part: part.inner, outer=lambda hidden, part: part.latent or hidden
        ),
    ),
}
FUSED_NORMS: Mapping[type, tuple[str, str]] = {  # Transformer Engine keeps these inside the linear layer that follows
    Grouped: ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    Dense: ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
}
GROUPED = {  # Transformer Engine has one layer for all experts of a rank, and in it a weight for each
    _EXPERT + "linear_fc1.weight": _MLP + "experts.linear_fc1.weight{expert}",
    _EXPERT + "linear_fc2.weight": _MLP + "experts.linear_fc2.weight{expert}",
}
