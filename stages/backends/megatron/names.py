"""Maps each parameter of a Megatron rank to tensors of a Hugging Face folder: one table for loading and saving.

    table = parameters(decoder, Part(tensor=1, tensors=2))
    for piece in table["decoder.layers.0.self_attention.linear_qkv.weight"].pieces:
        parameter[piece.inside] = folder[piece.name][piece.box]        # loading; swap the sides to save

Arithmetic only: no tensors, no processes. A rank holds the layers of its pipeline stage, its experts, and its
tensor-parallel part of each matrix. Megatron-core lays out Hugging Face tensors in five ways, see `Kind`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stages.backends.megatron.adapter_names import adapter_parameters
from stages.backends.megatron.parts import Part, stage_layers
from stages.backends.model.decoder import Decoder

Kind = Literal["whole", "rows", "columns", "stacked", "grouped"]
# whole    the whole tensor, on every tensor-parallel rank
# rows     a range of its rows
# columns  a range of its columns
# stacked  a range of rows from each of several tensors, stacked: gate and up of SwiGLU
# grouped  a range of rows from queries, keys and values, interleaved: for each key-value head its query heads, its key
#          and its value. With more ranks than key-value heads, several ranks hold rows of one, and none holds them all:
#          Megatron-core gathers their products (core/transformer/attention.py, get_query_key_value_tensors)
DIVIDED: Mapping[Kind, int | None] = {"whole": None, "rows": 0, "columns": 1, "stacked": 0, "grouped": 0}


@dataclass(frozen=True)
class NameRule:
    """A Megatron-core parameter and the Hugging Face tensors that it consists of. On the left, {layer} and {expert}
    count within the rank; on the right, within the model."""

    parameter: str
    kind: Kind
    tensors: tuple[str, ...]
    when: Callable[[Decoder], bool] = lambda decoder: True


_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_EXPERT, _HF_EXPERT = _LAYER + "mlp.experts.local_experts.{expert}.", _HF + "mlp.experts.{expert}."


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"{_HF}self_attn.{part}_proj.{kind}" for part in "qkv")


FIRST = (NameRule("embedding.word_embeddings.weight", "rows", ("model.embed_tokens.weight",)),)
LAYER = (
    NameRule(_LAYER + "input_layernorm.weight", "whole", (_HF + "input_layernorm.weight",)),
    NameRule(_LAYER + "self_attention.linear_qkv.weight", "grouped", _qkv("weight")),
    NameRule(_LAYER + "self_attention.linear_qkv.bias", "grouped", _qkv("bias"), lambda decoder: decoder.qkv_bias),
    NameRule(
        _LAYER + "self_attention.q_layernorm.weight", "whole", (_HF + "self_attn.q_norm.weight",), lambda d: d.qk_norm
    ),
    NameRule(
        _LAYER + "self_attention.k_layernorm.weight", "whole", (_HF + "self_attn.k_norm.weight",), lambda d: d.qk_norm
    ),
    NameRule(_LAYER + "self_attention.linear_proj.weight", "columns", (_HF + "self_attn.o_proj.weight",)),
    NameRule(_LAYER + "pre_mlp_layernorm.weight", "whole", (_HF + "post_attention_layernorm.weight",)),
)
DENSE = (
    NameRule(_LAYER + "mlp.linear_fc1.weight", "stacked", (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight")),
    NameRule(_LAYER + "mlp.linear_fc2.weight", "columns", (_HF + "mlp.down_proj.weight",)),
)
ROUTER = (NameRule(_LAYER + "mlp.router.weight", "whole", (_HF + "mlp.gate.weight",)),)
EXPERT = (
    NameRule(
        _EXPERT + "linear_fc1.weight", "stacked", (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight")
    ),
    NameRule(_EXPERT + "linear_fc2.weight", "columns", (_HF_EXPERT + "down_proj.weight",)),
)
LAST = (
    NameRule("decoder.final_layernorm.weight", "whole", ("model.norm.weight",)),
    NameRule("output_layer.weight", "rows", ("lm_head.weight",), lambda decoder: not decoder.tied),
)
TIED = NameRule("output_layer.weight", "rows", ("model.embed_tokens.weight",))  # if the first stage is on another rank
FUSED_NORMS = {  # Transformer Engine keeps these norms inside the linear layer that follows them
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
GROUPED = {  # Transformer Engine has one layer for all experts of a rank, and in it a weight for each
    _EXPERT + "linear_fc1.weight": _LAYER + "mlp.experts.linear_fc1.weight{expert}",
    _EXPERT + "linear_fc2.weight": _LAYER + "mlp.experts.linear_fc2.weight{expert}",
}


@dataclass(frozen=True)
class TensorPiece:
    """A box of a Hugging Face tensor of `shape`, and the parameter row where it starts."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    at: int

    @property
    def box(self) -> tuple[slice, ...]:
        """Its slice of the tensor."""
        return (slice(*self.rows), *([slice(*self.columns)] if self.columns else []))

    @property
    def inside(self) -> slice:
        """Its slice of the parameter, over all columns."""
        return slice(self.at, self.at + self.rows[1] - self.rows[0])


@dataclass(frozen=True)
class Parameter:
    """A parameter of one rank. Rows that no piece fills are padding.

    `divided` is the dimension that tensor-parallel ranks divide, None if it is replicated. `expert` is True if it
    belongs to an expert; `copy` if the original is on another rank."""

    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]
    divided: int | None
    expert: bool = False
    copy: bool = False


def padded_vocab(decoder: Decoder, tensors: int) -> int:
    """Embedding rows, padded so that `tensors` ranks divide them evenly."""
    return -(-decoder.vocab // tensors) * tensors


def parameters(decoder: Decoder, part: Part) -> dict[str, Parameter]:
    """All parameters of a rank, by Megatron-core's names; with an adapter, those of the adapter."""
    if decoder.lora is not None:
        return adapter_parameters(parameters(replace(decoder, lora=None), part), decoder.lora)
    made: dict[str, Parameter] = {}
    experts = decoder.experts // part.experts
    if part.stage == 0:
        _add(made, decoder, part, FIRST)
    for number, layer in enumerate(stage_layers(decoder.layers, part.stages)[part.stage]):
        numbers = {"layer": (number, layer)}
        _add(made, decoder, part, (*LAYER, *(ROUTER if decoder.experts else DENSE)), numbers)
        for expert in range(experts):
            _add(made, decoder, part, EXPERT, numbers | {"expert": (expert, expert + part.expert * experts)})
    if part.stage == part.stages - 1:
        _add(made, decoder, part, LAST)
        if decoder.tied and part.stages > 1:
            shape, pieces = _laid_out(TIED, decoder, (part.tensor, part.tensors), TIED.tensors)
            made[TIED.parameter] = Parameter(shape, pieces, DIVIDED[TIED.kind], copy=True)
    return made


def plain_names(decoder: Decoder, part: Part) -> dict[str, str]:
    """The name of each parameter of a rank in Megatron-core's own layers, by its name in the layers that it is in."""
    return dict(zip(parameters(decoder, part), parameters(decoder, part.plain), strict=True))


def _add(
    made: dict[str, Parameter],
    decoder: Decoder,
    part: Part,
    rules: Sequence[NameRule],
    numbers: dict[str, tuple[int, int]] | None = None,
) -> None:
    here = {name: mine for name, (mine, _) in (numbers or {}).items()}
    there = {name: whole for name, (_, whole) in (numbers or {}).items()}
    own = (part.expert_tensor, part.expert_tensors) if "expert" in here else (part.tensor, part.tensors)
    for rule in rules:
        if rule.when(decoder):
            shape, pieces = _laid_out(rule, decoder, own, [name.format(**there) for name in rule.tensors])
            made[_named(rule, decoder, part).format(**here)] = Parameter(
                shape, pieces, DIVIDED[rule.kind], expert="expert" in here
            )


def _named(rule: NameRule, decoder: Decoder, part: Part) -> str:
    if part.grouped_experts and rule.parameter in GROUPED:
        return GROUPED[rule.parameter]
    name = rule.parameter.removeprefix(_LAYER)
    if not part.fused_norms or name not in FUSED_NORMS or (decoder.experts and name.startswith("pre_mlp")):
        return rule.parameter
    return _LAYER + FUSED_NORMS[name]


def _laid_out(
    rule: NameRule, decoder: Decoder, own: tuple[int, int], names: Sequence[str]
) -> tuple[tuple[int, ...], tuple[TensorPiece, ...]]:
    """Shape and pieces of a parameter made of the named tensors. `own` is the rank's index among the ranks that divide
    it, and their number."""
    index, ranks = own
    match rule.kind:
        case "whole":
            shape = _whole(names[0], decoder)
            return shape, (TensorPiece(names[0], shape, (0, shape[0]), None, 0),)
        case "rows":
            share = padded_vocab(decoder, ranks) // ranks
            start, stop = (min(share * (index + i), decoder.vocab) for i in (0, 1))
            piece = TensorPiece(names[0], (decoder.vocab, decoder.hidden), (start, stop), None, 0)
            return (share, decoder.hidden), (piece,) if stop > start else ()
        case "columns":
            width = decoder.heads * decoder.head_dim if "self_attn" in names[0] else decoder.intermediate
            share = width // ranks
            columns = (share * index, share * (index + 1))
            piece = TensorPiece(names[0], (decoder.hidden, width), (0, decoder.hidden), columns, 0)
            return (decoder.hidden, share), (piece,)
        case "stacked":
            share = decoder.intermediate // ranks
            rows = (share * index, share * (index + 1))
            shape = (decoder.intermediate, decoder.hidden)
            stacked = tuple(TensorPiece(name, shape, rows, None, share * i) for i, name in enumerate(names))
            return (share * len(names), decoder.hidden), stacked
        case "grouped":
            inner = () if names[0].endswith("bias") else (decoder.hidden,)
            share = qkv_rows(decoder) // ranks
            grouped = tuple(_grouped(decoder, share * index, share * (index + 1), names, inner))
            return (share, *inner), grouped


def _grouped(
    decoder: Decoder, first: int, stop: int, names: Sequence[str], inner: tuple[int, ...]
) -> Iterator[TensorPiece]:
    """The pieces of these rows of the interleaved matrix."""
    begin = 0
    for group in range(decoder.groups):
        for name, heads in zip(names, (decoder.heads // decoder.groups, 1, 1)):
            count = decoder.head_dim * heads
            low, high = max(first, begin) - begin, min(stop, begin + count) - begin
            if low < high:
                whole = (count * decoder.groups, *inner)
                yield TensorPiece(name, whole, (count * group + low, count * group + high), None, begin + low - first)
            begin += count


def qkv_rows(decoder: Decoder) -> int:
    """Rows of the matrix of queries, keys and values."""
    return decoder.head_dim * (decoder.heads + 2 * decoder.groups)


def _whole(name: str, decoder: Decoder) -> tuple[int, ...]:
    if name.endswith("mlp.gate.weight"):
        return (decoder.experts, decoder.hidden)
    return (decoder.head_dim if name.endswith(("q_norm.weight", "k_norm.weight")) else decoder.hidden,)
