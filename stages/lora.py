"""Low-rank adapters: the model stays as it is, and two small matrices beside each chosen layer are trained.

    policy = Model("Qwen/Qwen3-0.6B", lora=LoRA(rank=16, alpha=32, targets=("q_proj", "v_proj")))

Describes and checks them without loading a model; `stages.backends.model.adapters` computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ops.flops import Transformer, block_kinds
from pipeline import Model, WorkerGroup
from pipeline.declare.parameters import at_least, broken, is_whole, number
from pipeline.errors import Problem, StageError, shown
from stages.model_shape import DENSE, MIXTURES, known_config, says_heads, shape_faults

ALL = "all"
A, B = "lora_A.weight", "lora_B.weight"  # how the names of an adapter's two tensors end
NO_MIXTURES = "the CPU build computes no mixture of experts in an engine with adapters"  # of vLLM
LARGEST_RANK = 512  # that vLLM computes
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")  # the first, or the two that follow
_STATE_SPACE = ("in_proj", "out_proj")
_UNGATED = ("up_proj", "down_proj")
_PROJECTIONS = ("fc1_latent_proj", "fc2_latent_proj")  # around experts that compute in a smaller space
_LAYERS = {  # the linear layers of each family; of a mixture, "mlp" is that of dense layers and shared experts
    **dict.fromkeys(DENSE, _ATTENTION + _MLP),
    "qwen3_moe": _ATTENTION,
    "glm4_moe": _ATTENTION + _MLP,
    "deepseek_v3": _LATENT + _MLP,
    "nemotron_h": (*_ATTENTION, *_STATE_SPACE, *_UNGATED),
    "gpt_oss": _ATTENTION,
}
_NAMED = {"nemotron_h": _PROJECTIONS}  # layers that have an adapter where they are named; "all" leaves them out
_ROUTER = "routers stay as they are"
_EXPERTS = "experts are computed together, without adapters"
_WITHOUT = {  # layers that a family has, and why they have no adapters
    "qwen3_moe": {"gate": _ROUTER} | dict.fromkeys(_MLP, _EXPERTS),
    "glm4_moe": {"gate": _ROUTER},
    "gpt_oss": {"router": _ROUTER} | dict.fromkeys(("gate_up_proj", "down_proj"), _EXPERTS),
    "deepseek_v3": {"gate": _ROUTER, "kv_b_proj": "vLLM multiplies it into other matrices when it loads a model"},
    "nemotron_h": {"gate": _ROUTER, "conv1d": "a convolution is no linear layer"},
}


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """An adapter of a model (Hu et al. 2021, arXiv:2106.09685): a layer W computes W x + (alpha / rank) B A x. A [rank,
    inputs] starts at random, B [outputs, rank] at zero, so that training starts from the model.

    rank     of the matrices, 1 to 512
    alpha    above 0; alpha / rank multiplies what the adapter adds
    targets  the layers, by the last part of their names, such as ("q_proj", "v_proj"); "all" is every linear layer of
             the decoder layers, except experts and the projections around them
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str | Sequence[str] = ALL

    def __post_init__(self) -> None:
        if isinstance(self.targets, list):
            object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def scaling(self) -> float:
        """What multiplies B A x."""
        return self.alpha / self.rank

    def names(self, family: str) -> tuple[str, ...]:
        """The targets by name; "all" are those that models of a family (`model_type`) can have."""
        return _LAYERS.get(family, ()) if self.targets == ALL else tuple(self.targets)

    def layers(self, family: str, names: Collection[str], where: str) -> tuple[str, ...]:
        """The targets among the layers, by the last parts of their names, of a model of this family (`model_type`).
        Raises StageError for a target that is none of them."""
        known = [name for name in names if name in _can_have(family, names)]
        wanted = tuple(name for name in self.names(family) if name in known or self.targets != ALL)
        if wrong := [name for name in wanted or (ALL,) if name not in known]:
            raise StageError(*(_unknown_target(name, family, known, where) for name in wrong))
        return wanted

    def problems(self, config: dict[str, Any] | Any, where: str) -> Iterator[Problem]:
        """What is wrong with the description, and with its targets in a model with this config; an empty config is not
        known yet."""
        if wrong := list(broken(_RULES, self, where=where, says="LoRA has {}")):
            yield from wrong
            return
        listed = not isinstance(self.targets, str) and self.targets and all(isinstance(n, str) for n in self.targets)
        if self.targets != ALL and not listed:
            why = "targets are names of layers, in a tuple, or 'all'"
            what, fix = f"LoRA has targets={shown(self.targets)}", "targets=('q_proj', 'v_proj')"
            yield Problem(where=where, what=what, why=why, fix=fix)
        elif listed and (twice := [name for name in self.targets if self.targets.count(name) > 1]):
            what, why = f"LoRA has the target {twice[0]!r} twice", "a layer has one adapter"
            yield Problem(where=where, what=what, why=why, fix=f"name {twice[0]!r} once")
        elif config:
            yield from list(self._unknown(config, where)) or self._too_large(config, where)

    def _unknown(self, config: Mapping[str, Any], where: str) -> Iterator[Problem]:
        family, absent = str(config.get("model_type")), _absent(config)
        known = [name for name in _can_have(family, ()) if name not in absent]
        if not known:
            if self.targets == ALL:
                what, why = f"LoRA has targets='all' and the model is a {family!r}", "its layers are not known here"
                yield Problem(where=where, what=what, why=why, fix="name the layers, as in targets=('q_proj',)")
            return
        for name in () if self.targets == ALL else self.targets:
            if name not in known:
                yield _unknown_target(name, family, known, where, absent.get(name))

    def _too_large(self, config: Mapping[str, Any], where: str) -> Iterator[Problem]:
        """The target whose matrix has fewer rows or columns than the adapter's rank, as far as its size is known."""
        sides = _sides(config)
        found = [(sides[name], name) for name in self.names(str(config.get("model_type"))) if name in sides]
        if found and self.rank > min(found)[0]:
            side, name = min(found)
            why = f"{name!r} has a matrix with {side} rows or columns, and no change of it has a higher rank"
            yield Problem(where=where, what=f"LoRA has rank={self.rank}", why=why, fix=f"rank={side}, or other targets")


def _absent(config: Mapping[str, Any]) -> dict[str, str]:
    """Layers that models of this family can have and one with this config has not, and why."""
    if config.get("model_type") == "deepseek_v3" and "q_lora_rank" in config:
        rank = config["q_lora_rank"]
        return dict.fromkeys(_LATENT[:1] if rank else _LATENT[1:3], f"the model's config has q_lora_rank={rank}")
    if config.get("model_type") != "nemotron_h" or not (kinds := block_kinds(config)):
        return {}
    found: dict[str, str] = {}
    for names, made_by in ((_ATTENTION, ("attention",)), (_STATE_SPACE, ("mamba",)), (_UNGATED, ("mlp", "moe")),
                           (_PROJECTIONS, ("moe",))):  # fmt: skip
        if not set(made_by) & set(kinds):
            found |= dict.fromkeys(names, f"none of the model's layers is of the kind {' or '.join(made_by)}")
    latent = dict.fromkeys(_PROJECTIONS, "the model's config has no moe_latent_size")
    return found if config.get("moe_latent_size") else latent | found


def _sides(config: Mapping[str, Any]) -> dict[str, int]:
    """The smaller side of the smallest matrix that a layer's name stands for; none if the config does not say."""
    try:
        shape = Transformer.of(config)
    except (TypeError, ValueError, ArithmeticError):
        return {}
    if shape_faults(config) or not ("q_lora_rank" in config if shape.latent else says_heads(config)):
        return {}
    inner = [shape.dense_inner] * bool(shape.dense) + [shape.shared] * bool(shape.mixtures and shape.shared)
    inner += [] if shape.mixtures or shape.hybrid else [shape.intermediate]
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query}
    if sizes := shape.latent:
        query = shape.heads * (sizes.plain + sizes.rotary)
        sides = {"q_proj": query, "kv_a_proj_with_mqa": sizes.key_value + sizes.rotary,
                 "o_proj": shape.heads * sizes.value}  # fmt: skip
        sides |= {"q_a_proj": sizes.query, "q_b_proj": min(sizes.query, query)} if sizes.query else {}
    if hybrid := shape.hybrid:
        sides |= {"in_proj": hybrid.channels + hybrid.convolved + hybrid.heads, "out_proj": hybrid.channels}
        sides |= dict.fromkeys(_PROJECTIONS, shape.outer) if shape.outer else {}
    sides |= dict.fromkeys(_MLP, min(inner)) if inner else {}
    return {name: min(side, shape.hidden) for name, side in sides.items() if name not in _absent(config)}


def _can_have(family: str, otherwise: Collection[str]) -> tuple[str, ...]:
    """The layers of a family that can have adapters; `otherwise` if the family is not known."""
    return (*_LAYERS[family], *_NAMED.get(family, ())) if family in _LAYERS else tuple(otherwise)


def _unknown_target(name: str, family: str, known: Sequence[str], where: str, absent: str | None = None) -> Problem:
    why = _WITHOUT.get(family, {}).get(name, absent)
    near = get_close_matches(name, known, n=1) if why is None else ()
    return Problem(
        where=where,
        what=f"LoRA has the target {name!r}" + (", which is a part of the experts" if why == _EXPERTS else ""),
        why=why or "no layer of the model has that name",
        fix=f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(map(repr, known))}",
    )


def lora_problems(model: Model) -> Iterator[Problem]:
    """Reasons why a model cannot have its adapter, as far as they are known before it is loaded."""
    if isinstance(model.lora, LoRA):
        yield from model.lora.problems(known_config(model), str(model.location))


def group_problems(model: Model, group: WorkerGroup) -> Iterator[Problem]:
    """Reasons why a worker group cannot train or serve the model's adapter."""
    backend = group.description
    if backend is None or model.lora is None:
        return
    where, what = str(model.location), f"the model {model.source!r} has lora=, and worker group {group.name!r}"
    if not backend.adapts:
        why, fix = "that backend knows no adapters", "backend='torch' or 'vllm', or a Model without lora="
        yield Problem(where=where, what=f"{what} has the backend {backend.name!r}", why=why, fix=fix)
    elif group.fully_sharded:
        why, fix = "a model that is not trained needs no sharded optimizer", "fully_sharded=False"
        yield Problem(where=where, what=f"{what} is fully_sharded", why=why, fix=fix)
    elif group.weights != "auto":
        why, fix = "an adapter has not been tested on quantized weights", "weights='auto'"
        yield Problem(where=where, what=f"{what} has weights={group.weights!r}", why=why, fix=fix)
    elif "train" in backend.can and _divides_heads(model, group):
        what = f"{what} has tensor_parallel={group.tensor_parallel}, more than the model has key-value heads"
        why = "a rank would have no row of some target"
        yield Problem(where=where, what=what, why=why, fix="a smaller tensor_parallel")
    elif group.speculate:
        why, fix = "drafts are not verified with adapters", "speculate=0"
        yield Problem(where=where, what=f"{what} has speculate={group.speculate}", why=why, fix=fix)
    elif backend.name == "vllm" and isinstance(model.lora, LoRA):
        config, tensor = known_config(model), group.tensor_parallel
        for has, why, fix in not_in_vllm(model.lora, config, gpus=group.gpus > 0, tensor_parallel=tensor):
            yield Problem(where=where, what=f"{what} has {has}", why=why, fix=fix)


def not_in_vllm(
    lora: LoRA, config: Mapping[str, Any], *, gpus: bool, tensor_parallel: int
) -> Iterator[tuple[str, str, str]]:
    """What a group of vLLM has that goes together with no such adapter of a model with this config, why, and what
    does."""
    family, groups = str(config.get("model_type") or ""), config.get("n_groups")
    targets = lora.names(family)
    if not gpus and family in (*MIXTURES, "gpt_oss"):
        yield "the backend 'vllm' and no GPUs", NO_MIXTURES, "gpus=..., or backend='torch'"
    if around := [name for name in targets if name in _NAMED.get(family, ())]:
        why = "its experts hold this projection, and compute it without an adapter"
        yield f"the backend 'vllm', which does not adapt {around[0]!r}", why, "leave that target out"
    copied = isinstance(groups, int) and is_whole(tensor_parallel, 1) and groups % tensor_parallel > 0
    if copied and "in_proj" in targets and "mamba" in block_kinds(config):
        why = "vLLM copies the only group of Mamba heads to each rank, and would give ranks wrong rows of the adapter"
        yield f"tensor_parallel={tensor_parallel}, and an adapter of 'in_proj'", why, "other targets"


def _divides_heads(model: Model, group: WorkerGroup) -> bool:
    """Whether several ranks share a key-value head, as far as the model's config is known."""
    heads = known_config(model).get("num_key_value_heads")
    return isinstance(heads, int) and is_whole(group.tensor_parallel, 1) and group.tensor_parallel > heads


_RULES = (
    at_least("rank", 1, most=LARGEST_RANK, why=f"rank must be a whole number from 1 to {LARGEST_RANK}", fix=16),
    number("alpha", lambda value: value > 0, why="alpha must be a number above 0", fix=32),
)
