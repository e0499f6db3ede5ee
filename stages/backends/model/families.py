"""The families of models that are described layer by layer, and a Hugging Face config as a `Decoder`.

    decoder = decoder_of(config, where="graph.py:7")

What a family has is one line of `FAMILIES`. Knows the keys of configs; no weights, no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ops.flops import block_kinds
from pipeline.errors import Problem, StageError
from stages.backends.model.decoder import (
    Decoder,
    Dense,
    Grouped,
    Latent,
    Layer,
    Llama3Rope,
    Mixer,
    Mlp,
    Rope,
    Sparse,
    StateSpace,
    Yarn,
)
from stages.model_shape import is_sparse, rope_settings


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the models of a `model_type` have. A string is the key of the config that says whether they have it.

    bias, norm      of queries, keys and values: a bias; RMSNorm per head, of queries and keys
    latent          multi-head latent attention
    rotary          the part of a head that a rotary embedding turns, if the config does not say; None: all of it,
                    whatever the config says, as in transformers
    ropes           the scalings of rotary embeddings that are computed
    mixture         how a mixture scores experts; "" is none
    hybrid          each layer has one part, which a list names; no rotary embedding, and squared ReLU
    """

    bias: bool | str = False
    norm: bool | str = False
    latent: bool = False
    rotary: float | None = None
    ropes: tuple[str, ...] = ("default", "llama3")
    mixture: Literal["", "softmax", "sigmoid"] = ""
    hybrid: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "qwen2": Family(bias=True),
    "qwen3": Family(norm=True),
    "qwen3_moe": Family(norm=True, mixture="softmax"),
    "glm4_moe": Family(bias="attention_bias", norm="use_qk_norm", rotary=0.5, mixture="sigmoid"),
    "deepseek_v3": Family(latent=True, ropes=("default", "yarn"), mixture="sigmoid"),
    "nemotron_h": Family(ropes=("default",), mixture="sigmoid", hybrid=True),
}
HYBRID_NAMES = (  # Llama's and NemotronH's
    ("model.embed_tokens", "backbone.embeddings"),
    ("model.norm", "backbone.norm_f"),
    ("model.layers", "backbone.layers"),
    (".input_layernorm", ".norm"),
    (".post_attention_layernorm", ".norm"),
    (".self_attn.", ".mixer."),
    (".mlp.", ".mixer."),
)
READERS: Mapping[str, str] = {"qwen3_vl": "qwen3"}  # models that see images: the family of the part that reads
READER_NAMES = (("model.", "model.language_model."),)  # Llama's, and those of that part
_REFUSED: Mapping[str, str] = {  # families that are known, and why no engine builds them layer by layer
    "gpt_oss": "Megatron-core 0.16.1 computes neither attention sinks nor sliding windows without Transformer Engine",
    "qwen3_vl": "Megatron-core 0.16.1 has no layers of Qwen-VL that see images",
    "qwen2_5_vl": "Megatron-core 0.16.1 has no layers of Qwen-VL that see images",
}


def knows(config: Mapping[str, Any]) -> bool:
    """Whether `decoder_of` accepts it."""
    return not any(_problems(config, ""))


def reader_of(config: Mapping[str, Any]) -> Decoder | None:
    """What reads text in a model: the model, or that part of one that sees images. None if `decoder_of` does not accept
    it."""
    family = READERS.get(str(config.get("model_type")))
    if family is None:
        return decoder_of(config, "") if knows(config) else None
    text = config["text_config"]
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    text = {**text, "model_type": family, "tie_word_embeddings": tied}
    return replace(decoder_of(text, ""), renamed=READER_NAMES) if knows(text) else None


def decoder_of(config: Mapping[str, Any], where: str) -> Decoder:
    """Read a config. Raises StageError for settings that would be computed differently, and KeyError if it lacks a
    number."""
    if problems := list(_problems(config, where)):
        raise StageError(*problems)
    family = FAMILIES[config["model_type"]]
    if family.hybrid:
        return _hybrid(config, family)
    mixer = _latent(config) if family.latent else _grouped(config, family)
    layers = [Layer(mixer=mixer, mlp=_mlp(config, family, number)) for number in range(config["num_hidden_layers"])]
    return Decoder(
        layers=tuple(layers),
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        pad=padding_token(config),
        tied=bool(config.get("tie_word_embeddings")),
        eps=config["rms_norm_eps"],
        rope=_rope(config, family, mixer),
    )


def padding_token(config: Mapping[str, Any]) -> int | None:
    """The token that pads, as transformers takes it for the embedding: a negative number counts from the end."""
    pad, vocab = config.get("pad_token_id"), config["vocab_size"]
    return pad % vocab if isinstance(pad, int) and -vocab <= pad < vocab else None


def _problems(config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    name = config.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        yield Problem(
            where=where,
            what=f"the model is a {name!r}",
            why=_REFUSED.get(str(name), "the backend 'megatron' builds " + ", ".join(FAMILIES)),
            fix="one of these architectures, or backend='torch'" if name not in _REFUSED else "backend='torch'",
        )
        return
    if family.hybrid:
        yield from _hybrid_problems(config, where)
        return
    rope = rope_settings(config)
    kind, act = rope["rope_type"], config.get("hidden_act")
    biased = bool(config.get("attention_bias")) and family.bias != "attention_bias"
    one = family.mixture == "softmax" and config.get("num_experts_per_tok") == 1 and config.get("norm_topk_prob")
    unequal = config.get("num_key_value_heads") not in (None, config.get("num_attention_heads"))
    settings = (
        (f"rope_type={kind!r}", kind not in family.ropes, f"of this family, {' and '.join(family.ropes)} are computed"),
        (f"hidden_act={act!r}", act != "silu", "experts and MLPs are SwiGLU"),
        ("attention_bias=True", biased, "these projections have no bias here"),
        ("mlp_bias=True", bool(config.get("mlp_bias")), "feed-forward parts have no bias here"),
        ("use_sliding_window=True", bool(config.get("use_sliding_window")), "attention is over the whole sequence"),
        ("a quantization_config", bool(config.get("quantization_config")), "weights are read as they are stored"),
        (
            "num_experts_per_tok=1 with norm_topk_prob=True",
            bool(one),
            "Megatron-core does not divide a weight by itself",
        ),
        ("fewer key-value heads than heads", family.latent and unequal, "each head has its own keys and values"),
    )
    yield from _computed_differently(settings, where)


def _hybrid_problems(config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    kinds, mlp, mamba = block_kinds(config), config.get("mlp_hidden_act"), config.get("mamba_hidden_act")
    known = ("mamba", "attention", "mlp", "moe")
    unknown = sorted(set(kinds) - {*known})
    biases = [name for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias") if config.get(name)]
    settings = (
        (f"layers of the kind {unknown}", bool(unknown), f"the kinds are {', '.join(known)}"),
        ("n_shared_experts other than 1", "moe" in kinds and config.get("n_shared_experts", 1) != 1, "engines differ"),
        ("no layer with attention", "attention" not in kinds, "Megatron-core's configuration has attention heads"),
        (f"mlp_hidden_act={mlp!r}", mlp not in (None, "relu2"), "feed-forward parts have squared ReLU"),
        (f"mamba_hidden_act={mamba!r}", mamba not in (None, "silu"), "Mamba layers have SiLU"),
        (f"{', '.join(biases)}", bool(biases), "matrices have no bias here"),
        ("a sliding_window", bool(config.get("sliding_window")), "attention is over the whole sequence"),
        ("a quantization_config", bool(config.get("quantization_config")), "weights are read as they are stored"),
    )
    yield from _computed_differently(settings, where)


def _computed_differently(settings: Iterable[tuple[str, bool, str]], where: str) -> Iterator[Problem]:
    """Yield a problem for each setting that is true: what it is, whether it is, and why that is one."""
    for what, differs, why in settings:
        if differs:
            yield Problem(where=where, what=f"the model's config has {what}", why=why, fix="backend='torch'")


def _hybrid(config: Mapping[str, Any], family: Family) -> Decoder:
    parts: Mapping[str, Mapping[str, Any]] = {
        "mamba": {"mixer": _state_space(config), "mlp": None},
        "attention": {"mixer": _grouped(config, family), "mlp": None},
        "mlp": {"mixer": None, "mlp": Dense(inner=config.get("intermediate_size") or 0, gated=False)},
    }
    if "moe" in block_kinds(config):
        shared, latent = config["moe_shared_expert_intermediate_size"], config.get("moe_latent_size") or 0
        mixture = replace(_sigmoid(config), gated=False, shared=shared, latent=latent)
        parts = {**parts, "moe": {"mixer": None, "mlp": mixture}}
    return Decoder(
        layers=tuple(Layer(**parts[kind]) for kind in block_kinds(config)),
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        tied=False,  # whatever the config says, as in transformers and vLLM
        eps=config["layer_norm_epsilon"],
        renamed=HYBRID_NAMES,
    )


def _state_space(config: Mapping[str, Any]) -> StateSpace:
    return StateSpace(
        heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        groups=config["n_groups"],
        state=config["ssm_state_size"],
        kernel=config["conv_kernel"],
        chunk=config["chunk_size"],
        bias=bool(config.get("use_conv_bias", True)),
    )


def _has(config: Mapping[str, Any], said: bool | str) -> bool:
    return bool(config.get(said)) if isinstance(said, str) else said


def _grouped(config: Mapping[str, Any], family: Family) -> Grouped:
    heads = config["num_attention_heads"]
    return Grouped(
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        bias=_has(config, family.bias),
        norm=_has(config, family.norm),
    )


def _latent(config: Mapping[str, Any]) -> Latent:
    rope = rope_settings(config)
    sharpness = 1.0
    if rope["rope_type"] != "default" and (share := rope.get("mscale_all_dim")):
        sharpness = _growth(rope["factor"], share) ** 2
    return Latent(
        heads=config["num_attention_heads"],
        query=config.get("q_lora_rank") or 0,
        key_value=config["kv_lora_rank"],
        plain=config["qk_nope_head_dim"],
        rotary=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
        interleaved=bool(config.get("rope_interleave", True)),
        sharpness=sharpness,
    )


def _mlp(config: Mapping[str, Any], family: Family, number: int) -> Mlp:
    """The feed-forward part of a layer, counted from 0."""
    if family.mixture == "softmax" and is_sparse(config, number):
        return Sparse(
            experts=config.get("num_experts") or config["num_local_experts"],
            chosen=config["num_experts_per_tok"],
            inner=config["moe_intermediate_size"],
            renormalised=bool(config["norm_topk_prob"]),
        )
    if family.mixture == "sigmoid" and is_sparse(config, number):
        return replace(_sigmoid(config), shared=config["moe_intermediate_size"] * (config["n_shared_experts"] or 0))
    return Dense(inner=config["intermediate_size"])


def _sigmoid(config: Mapping[str, Any]) -> Sparse:
    """A mixture routed by sigmoids, without its shared expert."""
    return Sparse(
        experts=config.get("n_routed_experts") or config["num_local_experts"],
        chosen=config["num_experts_per_tok"],
        inner=config["moe_intermediate_size"],
        renormalised=bool(config["norm_topk_prob"]),
        sigmoid=True,
        divisions=config["n_group"],
        kept=config["topk_group"],
        scale=float(config["routed_scaling_factor"]),
    )


def _rope(config: Mapping[str, Any], family: Family, mixer: Mixer) -> Rope:
    rope = rope_settings(config)
    part = 1.0 if family.rotary is None else rope.get("partial_rotary_factor") or family.rotary
    dims = mixer.rotary if isinstance(mixer, Latent) else int(mixer.head_dim * part)
    scalings: dict[str, Callable[[Mapping[str, Any]], Llama3Rope | Yarn]] = {"llama3": _llama3, "yarn": _yarn}
    scaling = scalings.get(rope["rope_type"])
    return Rope(base=float(rope["rope_theta"]), dims=dims, scaling=scaling(rope) if scaling else None)


def _llama3(rope: Mapping[str, Any]) -> Llama3Rope:
    return Llama3Rope(
        factor=rope["factor"],
        low=rope["low_freq_factor"],
        high=rope["high_freq_factor"],
        original=rope["original_max_position_embeddings"],
    )


def _yarn(rope: Mapping[str, Any]) -> Yarn:
    factor, own, share = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    amplitude = _growth(factor, own) / _growth(factor, share) if own and share else _growth(factor, 1.0)
    return Yarn(
        factor=factor,
        original=rope["original_max_position_embeddings"],
        fast=rope.get("beta_fast") or 32,
        slow=rope.get("beta_slow") or 1,
        amplitude=rope["attention_factor"] if rope.get("attention_factor") is not None else amplitude,
        truncated=rope.get("truncate", True),
    )


def _growth(factor: float, share: float) -> float:
    """YaRN's 0.1 ln(factor) + 1, with a share of the logarithm."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0
