"""A decoder's dimensions, from a Hugging Face config. Knows which architectures this backend can build; no tensors.

decoder = Decoder.of(config, where="graph.py:7")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Problem, StageError
from stages.lora import LoRA

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's scaling of rotary frequencies: long wavelengths are divided by `factor`, short ones stay, and those
    in between are interpolated (transformers, modeling_rope_utils)."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A Llama-style decoder-only transformer.

    layers, hidden, vocab      number of blocks, hidden size, vocabulary size
    heads, groups, head_dim    query heads, key-value heads, size of each
    intermediate               of the MLP; of one expert in a mixture
    tied                       whether input and output embeddings are tied
    qkv_bias, qk_norm          whether QKV has a bias; whether queries and keys are normalized
    experts, chosen            experts of a mixture, and experts per token; 0 is a dense decoder
    renormalise                whether the weights of the chosen experts are normalized to 1
    eps, rope_base, rope       of the norms; of the rotary embedding
    lora                       the adapter that is trained in its place
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    groups: int
    head_dim: int
    intermediate: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int = 0
    chosen: int = 0
    renormalise: bool = True
    eps: float = 1e-6
    rope_base: float = 10000.0
    rope: Llama3Rope | None = None
    lora: LoRA | None = None

    @staticmethod
    def knows(config: Mapping[str, Any]) -> bool:
        """Whether `of` accepts it."""
        return not any(_problems(config, ""))

    @staticmethod
    def of(config: Mapping[str, Any], where: str) -> Decoder:
        """Read a config. Raises StageError for settings that this backend would compute differently."""
        if problems := list(_problems(config, where)):
            raise StageError(*problems)
        family, heads = config["model_type"], config["num_attention_heads"]
        mixture = family == "qwen3_moe"
        rope = _rope(config)
        return Decoder(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            vocab=config["vocab_size"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["moe_intermediate_size" if mixture else "intermediate_size"],
            tied=bool(config.get("tie_word_embeddings")),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            experts=config.get("num_experts") or config["num_local_experts"] if mixture else 0,
            chosen=config["num_experts_per_tok"] if mixture else 0,
            renormalise=bool(config["norm_topk_prob"]) if mixture else True,
            eps=config["rms_norm_eps"],
            rope_base=float(rope["rope_theta"]),
            rope=_llama3(rope) if rope.get("rope_type") == "llama3" else None,
        )


def _problems(config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    family = config.get("model_type")
    if family not in FAMILIES:
        yield Problem(
            where=where,
            what=f"the model is a {family!r}",
            why="the backend 'megatron' builds " + ", ".join(FAMILIES),
            fix="one of these architectures, or backend='torch'",
        )
        return
    kind = _rope(config).get("rope_type", "default")
    for what, differs, why in (
        (f"rope_type={kind!r}", kind not in ("default", "llama3"), "rotary embeddings are plain or Llama 3's"),
        (f"hidden_act={config.get('hidden_act')!r}", config.get("hidden_act") != "silu", "experts and MLPs are SwiGLU"),
        ("attention_bias=True", bool(config.get("attention_bias")), "an output projection has no bias here"),
        ("mlp_bias=True", bool(config.get("mlp_bias")), "feed-forward parts have no bias here"),
        ("use_sliding_window=True", bool(config.get("use_sliding_window")), "attention is over the whole sequence"),
        (
            "layers that are not a mixture",
            bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1,
            "all layers are alike",
        ),
    ):
        if differs:
            yield Problem(where=where, what=f"the model's config has {what}", why=why, fix="backend='torch'")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings, which older configs spread over two keys."""
    if config.get("rope_parameters"):
        return {"rope_theta": 10000.0} | config["rope_parameters"]
    scaling = dict(config.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10000.0)} | scaling


def _llama3(rope: Mapping[str, Any]) -> Llama3Rope:
    return Llama3Rope(
        factor=rope["factor"],
        low=rope["low_freq_factor"],
        high=rope["high_freq_factor"],
        original=rope["original_max_position_embeddings"],
    )
