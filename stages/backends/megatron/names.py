"""Maps each parameter of a Megatron rank to tensors of a Hugging Face folder: one table for loading and saving.

    table = parameters(decoder, Part(tensor=1, tensors=2))
    for piece in table["decoder.layers.0.self_attention.linear_qkv.weight"].pieces:
        parameter[piece.inside] = folder[piece.name][piece.box]        # loading; swap the sides to save

Arithmetic only: no tensors, no processes. A rank holds the layers of its pipeline stage, its experts, and its
tensor-parallel part of each matrix. `rules.py` has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.backends.megatron.adapter_names import adapter_parameters
from stages.backends.megatron.parts import Part, stage_layers
from stages.backends.megatron.rules import (
    BEFORE_MIXER,
    BEFORE_MLP,
    DIVIDED,
    FIRST,
    FUSED_NORMS,
    GROUPED,
    LAST,
    LAYER,
    PARTS,
    TIED,
    NameRule,
    Shape,
)
from stages.backends.model.decoder import Decoder, Grouped
from stages.backends.model.precision import kept_dtype


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
    belongs to an expert; `copy` if the original is on another rank. `dtype` is its own, "" that of all weights."""

    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]
    divided: int | None
    expert: bool = False
    copy: bool = False
    dtype: str = ""


def padded_vocab(decoder: Decoder, tensors: int) -> int:
    """Embedding rows, padded so that `tensors` ranks divide them evenly."""
    return -(-decoder.vocab // tensors) * tensors


def parameters(decoder: Decoder, part: Part) -> dict[str, Parameter]:
    """All parameters of a rank, by Megatron-core's names; with an adapter, those of the adapter."""
    if decoder.lora is not None:
        return adapter_parameters(parameters(replace(decoder, lora=None), part), decoder.lora)
    made = _Made({}, decoder, part)
    if part.stage == 0:
        made.add(FIRST, decoder)
    for number, layer in enumerate(stage_layers(len(decoder.layers), part.stages)[part.stage]):
        numbers = {"layer": (number, layer)}
        for norm, kind in ((BEFORE_MIXER, decoder.layers[layer].mixer), (BEFORE_MLP, decoder.layers[layer].mlp)):
            if kind is not None:
                made.add((norm, *PARTS[type(kind)]), kind, numbers)
    if part.stage == part.stages - 1:
        made.add(LAST, decoder)
        if decoder.tied and part.stages > 1:
            names = [decoder.called(name) for name in TIED.tensors]
            shape, pieces = _laid_out(TIED, decoder.hidden, decoder, (part.tensor, part.tensors), names)
            made.table[TIED.parameter] = Parameter(shape, pieces, DIVIDED[TIED.kind], copy=True)
    return made.table


def plain_names(decoder: Decoder, part: Part) -> dict[str, str]:
    """The name of each parameter of a rank in Megatron-core's own layers, by its name in the layers that it is in."""
    return dict(zip(parameters(decoder, part), parameters(decoder, part.plain), strict=True))


@dataclass(frozen=True)
class _Made:
    """The table of a rank's parameters while it is filled."""

    table: dict[str, Parameter]
    decoder: Decoder
    part: Part

    def add(self, rules: Sequence[NameRule], kind: Any, numbers: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Add what the rules say of a part of a layer, or of the decoder. `numbers` are those here and in the model;
        rules of experts are followed for each expert of the rank, one expert after the other."""
        numbers = dict(numbers or {})
        single = [rule for rule in rules if "{expert}" not in rule.parameter]
        for rule in single:
            self._add(rule, kind, numbers, (self.part.tensor, self.part.tensors))
        if len(single) < len(rules):
            experts = kind.experts // self.part.experts
            for expert in range(experts):
                own = numbers | {"expert": (expert, expert + self.part.expert * experts)}
                for rule in rules[len(single) :]:
                    self._add(rule, kind, own, (self.part.expert_tensor, self.part.expert_tensors))

    def _add(self, rule: NameRule, kind: Any, numbers: Mapping[str, tuple[int, int]], own: tuple[int, int]) -> None:
        if rule.when(kind):
            here = {name: mine for name, (mine, _) in numbers.items()}
            there = {name: whole for name, (_, whole) in numbers.items()}
            names = [self.decoder.called(name.format(**there)) for name in rule.tensors]
            shape, pieces = _laid_out(rule, self.decoder.hidden, kind, own, names)
            self.table[_named(rule, kind, self.part).format(**here)] = Parameter(
                shape, pieces, DIVIDED[rule.kind], expert="expert" in here, dtype=kept_dtype(rule.tensors[0])
            )


def _named(rule: NameRule, kind: Any, part: Part) -> str:
    """The name of a parameter in the layers that hold the part."""
    if part.grouped_experts and rule.parameter in GROUPED:
        return GROUPED[rule.parameter]
    norm, fused = FUSED_NORMS.get(type(kind), ("", ""))
    return LAYER + fused if part.fused_norms and rule.parameter == LAYER + norm else rule.parameter


def _laid_out(
    rule: NameRule, hidden: int, kind: Any, own: tuple[int, int], names: Sequence[str]
) -> tuple[Shape, tuple[TensorPiece, ...]]:
    """Shape and pieces of a parameter made of the named tensors of a part of a layer. `own` is the rank's index among
    the ranks that divide it, and their number. Rows that do not divide evenly, those of embeddings, are padded."""
    index, ranks = own
    whole = rule.shape(hidden, kind)
    match rule.kind:
        case "whole":
            return whole, (TensorPiece(names[0], whole, (0, whole[0]), None, 0),)
        case "rows":
            share = -(-whole[0] // ranks)
            start, stop = (min(share * (index + i), whole[0]) for i in (0, 1))
            piece = TensorPiece(names[0], whole, (start, stop), None, 0)
            return (share, *whole[1:]), (piece,) if stop > start else ()
        case "columns":
            share = whole[1] // ranks
            columns = (share * index, share * (index + 1))
            return (whole[0], share), (TensorPiece(names[0], whole, (0, whole[0]), columns, 0),)
        case "sections":
            cut, begin, at = [], 0, 0
            for size in rule.sections(kind):
                share = size // ranks
                rows = (begin + share * index, begin + share * (index + 1))
                cut.append(TensorPiece(names[0], whole, rows, None, at))
                begin, at = begin + size, at + share
            return (at, *whole[1:]), tuple(cut)
        case "stacked":
            share = whole[0] // ranks
            rows = (share * index, share * (index + 1))
            stacked = tuple(TensorPiece(name, whole, rows, None, share * i) for i, name in enumerate(names))
            return (share * len(names), *whole[1:]), stacked
        case "grouped":
            share = qkv_rows(kind) // ranks
            grouped = tuple(_grouped(kind, share * index, share * (index + 1), names, whole))
            return (share, *whole), grouped


def _grouped(kind: Grouped, first: int, stop: int, names: Sequence[str], inner: Shape) -> Iterator[TensorPiece]:
    """The pieces of these rows of the interleaved matrix."""
    begin = 0
    for group in range(kind.groups):
        for name, heads in zip(names, (kind.heads // kind.groups, 1, 1)):
            count = kind.head_dim * heads
            low, high = max(first, begin) - begin, min(stop, begin + count) - begin
            if low < high:
                whole = (count * kind.groups, *inner)
                yield TensorPiece(name, whole, (count * group + low, count * group + high), None, begin + low - first)
            begin += count


def qkv_rows(kind: Grouped) -> int:
    """Rows of the matrix of queries, keys and values."""
    return kind.head_dim * (kind.heads + 2 * kind.groups)
