"""A model's configuration before it is loaded: what is wrong with its numbers, which layers have experts, and how fast
the cost of a sample grows. Loads no model and no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ops.flops import Transformer, block_kinds, quadratic_cost
from pipeline import Model
from pipeline.declare.parameters import is_number, is_whole
from pipeline.errors import Problem, shown
from pipeline.reading import BROKEN, check_file, reason

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
FAMILIES = (*DENSE, *MIXTURES)
WHOLE_HEADS = (*DENSE, "qwen3_moe", "deepseek_v3")  # families of which transformers turns no part of a head only
# Tokens x weights that a token meets in a layer. Of Qwen3-0.6B on an H200, 28 layers are launched in 148 ms and a token
# takes 10.2 microseconds (gpu.update.rows.h200, and the rate "layers" of pipeline/foretell/gpus/h200.json).
LAUNCHED = 2.3e11
SHARED = ("glm4_moe", "deepseek_v3")  # mixtures with shared experts beside SwiGLU experts
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # of deepseek_v3
_NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL = ("num_key_value_heads", "head_dim")
_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "a multiple of": lambda number, other: number % other == 0,
    "a divisor of": lambda number, other: other % number == 0,
    "at most": lambda number, other: number <= other,
    "at most half of": lambda number, other: 2 * number <= other,
    "equal to": lambda number, other: number == other,
}
_RULES = (  # a key, what its number must be, and the key of the number that this is compared with
    ("num_attention_heads", "a multiple of", "num_key_value_heads"),
    ("num_experts_per_tok", "at most", "num_experts"),
    ("num_experts_per_tok", "at most", "n_routed_experts"),
    ("num_experts_per_tok", "at most", "num_local_experts"),
    ("n_group", "a divisor of", "n_routed_experts"),
    ("n_group", "at most half of", "n_routed_experts"),  # the scores of two experts are that of their group
    ("topk_group", "at most", "n_group"),
    ("n_groups", "a divisor of", "mamba_num_heads"),
    ("head_dim", "equal to", "qk_rope_head_dim"),  # of deepseek_v3: transformers takes it for what is rotated
)
_LATENT_NULL = ("q_lora_rank", "moe_latent_size")  # numbers that may be null
_NULL = (*OPTIONAL, *_LATENT_NULL)  # in other families than nemotron_h
_SIZES = (
    "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "decoder_sparse_step", "moe_intermediate_size", "ssm_state_size",
    "mamba_head_dim", "conv_kernel", "chunk_size",
)  # fmt: skip
_WHOLE = tuple(dict.fromkeys((*(key for key, _, other in _RULES for key in (key, other)), *_SIZES, *_NULL)))
_RELATED = (*FAMILIES, "nemotron_h", "gpt_oss")  # families whose keys those are


class FileFault(NamedTuple):
    """What is wrong with a file of a model, and why it matters."""

    file: Path
    what: str
    why: str

    def problem(self, model: Model) -> Problem:
        """Return it as an error of the model that has the file."""
        what, fix = f"{self.file}: {self.what}", "save or download the model again"
        return Problem(where=str(model.location), what=what, why=self.why, fix=fix)


def attention_cost(model: Model) -> float:
    """q, 1 / tokens: a sample of n tokens costs n + q n^2 tokens. 0.0 if the model's shape is unknown before it loads.

    It is known from the `config` of a `Model` or the config.json of a local folder, for the architectures of
    `ops.flops.Transformer`; attention counts as causal over the whole sample.
    """
    return _of_shape(model, quadratic_cost)


def launched_tokens(model: Model) -> float:
    """The tokens of a row that a GPU computes for as long as the host launches its kernels; 0.0 if the model's shape is
    unknown before it loads."""
    return _of_shape(model, lambda shape: LAUNCHED * shape.layers / shape.token_products)


def _of_shape(model: Model, number: Callable[[Transformer], float]) -> float:
    """Return a number of a model's shape; 0.0 if that is unknown."""
    try:
        return number(Transformer.of(_config(model)))
    except (*BROKEN, TypeError, ArithmeticError):  # a wrong config is reported when the model is built
        return 0.0


def known_config(model: Model) -> Mapping[str, Any]:
    """Return the model's Hugging Face config, as far as it is known before the model is loaded; empty if it is not."""
    try:
        return _config(model)
    except (*BROKEN, TypeError):  # of a hub, or reported by `model_problems`
        return {}


def shape_faults(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is wrong, and why, with the numbers of a config, of the families that name them so. A number that is
    left out is not wrong."""
    family = config.get("model_type")
    if family not in _RELATED:
        return []
    names = (*_NUMBERS, *_WHOLE) if family in FAMILIES else _WHOLE
    given = {name: config[name] for name in names if name in config}
    wrong = {
        name: (f"{name}={shown(value)}", "it must be a whole number, 1 or more")
        for name, value in given.items()
        if not is_whole(value, 1)
        and not (value is None and name in (_NULL if family != "nemotron_h" else _LATENT_NULL))
    }
    for name, relation, other in () if wrong else _RULES:
        number, limit = given.get(name), given.get(other)
        if number and limit and not _RELATIONS[relation](number, limit):
            wrong.setdefault(name, (f"{name}={number}", f"it must be {relation} {other}={limit}"))
    return list(wrong.values()) or list(_setting_faults(config))


def _setting_faults(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings that transformers refuses, when it builds the model or at the first step, with the reason."""
    family, rope = config["model_type"], rope_settings(config)
    shared, scale = config.get("n_shared_experts", 0), config.get("routed_scaling_factor", 1.0)
    if family in (*SHARED, "nemotron_h") and not is_whole(shared, 0):
        yield f"n_shared_experts={shown(shared)}", "it must be a whole number, 0 or more"
    if family in SHARED and not is_whole(config.get("first_k_dense_replace", 0), 0):
        dense = shown(config["first_k_dense_replace"])
        yield f"first_k_dense_replace={dense}", "it must be a whole number, 0 or more"
    if family in SHARED and not isinstance(scale, float):
        yield f"routed_scaling_factor={shown(scale)}", "transformers takes a number with a point for it, as 1.0"
    if (size := _turned(config)) % 2:
        yield f"head_dim={size}", "it must be even: a rotary embedding turns pairs of dimensions"
    kinds, absent = config.get("layer_types"), "" if config.get("use_sliding_window") else "use_sliding_window"
    absent = absent or ("sliding_window" if config.get("sliding_window", 1) is None else "")
    if absent and family in ("qwen2", "qwen3") and isinstance(kinds, list) and "sliding_attention" in kinds:
        yield (
            f"{absent}={shown(config.get(absent, False))}",
            "layer_types has 'sliding_attention', which needs a window",
        )
    part, kind = rope.get("partial_rotary_factor"), rope["rope_type"]
    if family in WHOLE_HEADS and part not in (None, 1) and kind != "default":
        yield (
            f"partial_rotary_factor={shown(part)} with rope_type={shown(kind)}",
            f"transformers turns whole heads of a {family!r}, and scales the rotary embedding of a part",
        )


def _turned(config: Mapping[str, Any]) -> int:
    """Dimensions that a rotary embedding turns, of families that turn whole heads; 0 if the config does not say."""
    family = config["model_type"]
    if family not in (*WHOLE_HEADS, "gpt_oss"):
        return 0
    derived = 0
    if family in ("llama", "mistral", "qwen2"):
        derived = config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    return config.get("qk_rope_head_dim" if family == "deepseek_v3" else "head_dim") or derived


def positions(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a prompt and its response; None if the config does not say.

    Linear and dynamic scaling stretch the positions of the config, which has those that YaRN and others have stretched,
    as in vLLM 0.32 (vllm/config/model.py, `_get_and_verify_max_len`).
    """
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    most: Any = text.get("max_position_embeddings")
    if not is_whole(most, 1):
        return None
    rope = rope_settings(text)
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    stretches = kind in ("linear", "dynamic") and is_number(factor) and (factor or 0) > 0
    return int(most * factor) if stretches else int(most)


def length_problems(model: Model, max_tokens: Any, where: str, says: str) -> Iterator[Problem]:
    """Yield a problem if a prompt of one token and a response of `max_tokens` are longer than the model allows."""
    most = positions(known_config(model))
    if most is not None and is_whole(max_tokens, 1) and max_tokens >= most:
        yield Problem(
            where=where,
            what=f"{says} has max_tokens={max_tokens}, and a prompt and its response have at most {most:,} tokens",
            why=f"the config of model {model.source!r} says so (max_position_embeddings)",
            fix=f"max_tokens={most // 2}, which leaves as much for the prompt" if most > 1 else "another model",
        )


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings, with a `rope_theta` and a `rope_type`. Older configs spread them over several keys."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = given if isinstance(given, dict) else {}
    older = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return {"rope_theta": 10000.0, "rope_type": given.get("type") or "default"} | older | given


def says_heads(config: Mapping[str, Any]) -> bool:
    """Whether a config has the sizes of grouped attention, so that no default of transformers counts."""
    own_dim = config["model_type"].startswith("qwen3")  # without head_dim it is not hidden_size / num_attention_heads
    return "num_key_value_heads" in config and bool(config.get("head_dim") or not own_dim)


def is_sparse(config: Mapping[str, Any], number: int) -> bool:
    """Whether a layer, counted from 0, has a mixture of experts. Raises KeyError if the config does not say."""
    family = config["model_type"]
    if family == "nemotron_h":
        return block_kinds(config)[number] == "moe"
    if family == "qwen3_moe":
        dense = number in (config.get("mlp_only_layers") or ())
        return not dense and (number + 1) % (config.get("decoder_sparse_step") or 1) == 0
    return family in MIXTURES and number >= config["first_k_dense_replace"]


def sparse_layers(config: Mapping[str, Any]) -> list[int]:
    """Return which layers, counted from 0, have a mixture of experts. Raises KeyError if the config does not say."""
    kinds = block_kinds(config) if config["model_type"] == "nemotron_h" else ()
    layers = len(kinds) or config["num_hidden_layers"]
    return [number for number in range(layers) if is_sparse(config, number)]


def uneven(number: int, what: str, by: str, ranks: int, where: str) -> Iterator[Problem]:
    """Why ranks cannot divide this number of parts of a model evenly."""
    if number % ranks:
        yield Problem(
            where=where,
            what=f"{by}={ranks} does not divide the model's {what} ({number})",
            why="all ranks hold equal parts",
            fix=f"use a divisor of {number}" if number > 1 else f"{by}=1",
        )


def read_config(file: Path) -> tuple[Mapping[str, Any], list[FileFault]]:
    """Return a saved config and what is wrong with it. It must have its family's numbers: transformers would take those
    of another model in their place."""
    describes = "it describes the model"
    try:
        check_file(file)
        config = json.loads(file.read_bytes())
    except BROKEN as error:
        return {}, [FileFault(file, f"it cannot be read: {reason(error)}", describes)]
    if not (isinstance(config, dict) and "model_type" in config):
        return {}, [FileFault(file, "it has no 'model_type'", describes)]
    absent = [name for name in _NUMBERS if name not in config] if config["model_type"] in FAMILIES else []
    faults = [FileFault(file, f"it has no {', '.join(map(repr, absent))}", describes)] if absent else []
    return config, faults + [FileFault(file, what, why) for what, why in shape_faults(config)]


def _config(model: Model) -> Mapping[str, Any]:
    if model.config is not None:
        characters = 256 if model.alphabet == "bytes" else len(model.alphabet or "")
        return {"vocab_size": characters + 2, **model.config}  # padding, end of sequence
    file = Path(model.source) / "config.json"
    check_file(file)
    return dict(json.loads(file.read_text()))
