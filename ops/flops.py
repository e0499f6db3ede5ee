"""Floating point operations of a decoder-only transformer, from its shape and the lengths of its sequences.

Arithmetic on numbers; loads no tensor library. A multiply and an add are two operations.

    shape = Transformer.of(json.loads(Path("config.json").read_text()))
    done = model_flops(shape, lengths=[1024, 700], training=True)
    cost = [n + quadratic_cost(shape) * n**2 for n in (1024, 700)]        # in tokens, to compare samples
    utilisation = done / seconds / (1e12 * ranks * peak_tflops("NVIDIA H200"))

Counts matrix products, as PaLM (arXiv 2204.02311, appendix B) and Narayanan et al. (arXiv 2104.04473, section 5.1) do.
Norms, activations, rotary embeddings, softmax and the optimizer are left out; they are a few tenths of a percent in
models of a billion parameters or more. Padding and recomputed activations do not count as the model's work. In a
mixture of experts, a token counts the router and the experts chosen for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHARED = ("glm4_moe", "deepseek_v3")  # a shared expert, after dense blocks
_MIXTURES = {  # the name of an expert's size
    "mixtral": "intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
    **dict.fromkeys(_SHARED, "moe_intermediate_size"),
}


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): of the latents of queries (0
    if they have none) and of keys and values; of a head's key without and with a rotary embedding, and of its value."""

    query: int
    key_value: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Blocks that have one part each (NemotronH, arXiv 2504.03624): how many are attention, Mamba-2 (arXiv 2405.21060)
    and mixtures, and the sizes of Mamba-2: channels, heads, groups that share B and C, size of a state, positions of
    the convolution. All other blocks are dense feed-forward layers."""

    attention: int
    mamba: int
    mixtures: int
    channels: int
    heads: int
    groups: int
    state: int
    kernel: int

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return self.channels + 2 * self.groups * self.state

    def weights(self, hidden: int) -> int:
        """Number of weights of a Mamba-2 block, without biases, norms and what a head has one of."""
        projected = self.channels + self.convolved + self.heads
        return hidden * (projected + self.channels) + self.convolved * self.kernel

    @property
    def state_products(self) -> int:
        """Multiplications of a Mamba-2 block's state per token: what goes in, and what comes out. Computed in chunks,
        there are more, which do not count as the model's work."""
        return 2 * self.channels * self.state


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The shape of a decoder-only transformer whose blocks are alike, but for the first of a mixture, or hybrids.

    layers, hidden      number of blocks, and size of a token's hidden state
    intermediate        inner size of a block's feed-forward layer, or of one expert
    experts, chosen     experts of a block, and experts per token; 0 and 1 without a mixture
    shared              inner size of the experts that every token of a mixture has
    outer               size of what the other experts take and give; 0 is `hidden`
    dense, dense_inner  first blocks that have no mixture, and the inner size of their feed-forward layer
    heads, kv_heads     number of query heads, and of key-value heads
    head_dim            size of one head
    latent              the sizes of latent attention, which has no `kv_heads` and no `head_dim`; None is another one
    vocab               rows of the output embedding
    hybrid              the kinds of blocks, if each has one part; `dense` are then those with a feed-forward layer
    gated               whether the feed-forward layer has three matrices (SwiGLU, arXiv 2002.05202) or two
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    experts: int = 0
    chosen: int = 1
    shared: int = 0
    outer: int = 0
    dense: int = 0
    dense_inner: int = 0
    latent: LatentSizes | None = None
    hybrid: Hybrid | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> Transformer:
        """Build from a Hugging Face `config.json` of a Llama-like model (Llama, Mistral, Qwen2, Qwen3, Gemma) of a
        mixture of experts whose layers are alike (Mixtral, Qwen3-MoE) but for the first (GLM-4.5, DeepSeek-V3), or of a
        hybrid (NemotronH).

        Raises ValueError for another mixture, or if the config lacks a number.
        """
        if config.get("model_type") == "nemotron_h":
            return _hybrid(config)
        experts, inner = _experts(config)
        names = ["num_hidden_layers", "hidden_size", inner, "num_attention_heads", "vocab_size"]
        names += ["num_experts_per_tok"] if experts else []
        latent = _LATENT if config.get("model_type") == "deepseek_v3" else ()
        if missing := [name for name in (*names, *latent) if not config.get(name)]:
            raise ValueError(f"the config has no {', '.join(missing)}")
        layers, hidden, intermediate, heads, vocab, *chosen = (int(config[name]) for name in names)
        dense, dense_inner, shared = _first_and_shared(config)
        return Transformer(
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=vocab,
            experts=experts,
            chosen=chosen[0] if chosen else 1,
            latent=LatentSizes(
                query=int(config.get("q_lora_rank") or 0), **{size: int(config[name]) for name, size in _LATENT.items()}
            )
            if latent
            else None,
            dense=dense,
            dense_inner=dense_inner,
            shared=shared,
        )

    @property
    def attention_weights(self) -> int:
        """Number of weights of a block's attention, without biases and norms."""
        if self.latent is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        sizes = self.latent
        queries = self.heads * (sizes.plain + sizes.rotary)
        found = queries * self.hidden if not sizes.query else sizes.query * (self.hidden + queries)
        found += self.hidden * (sizes.key_value + sizes.rotary + self.heads * sizes.value)
        return found + sizes.key_value * self.heads * (sizes.plain + sizes.value)

    @property
    def pair_products(self) -> int:
        """Multiplications in a block's attention for each pair of a query and a key: scores, and sum of values."""
        sizes = self.latent
        return self.heads * (2 * self.head_dim if sizes is None else sizes.plain + sizes.rotary + sizes.value)

    @property
    def attentions(self) -> int:
        """Number of blocks that have attention."""
        return self.hybrid.attention if self.hybrid else self.layers

    @property
    def mixtures(self) -> int:
        """Number of blocks that have a mixture."""
        return self.hybrid.mixtures if self.hybrid else self.layers - self.dense if self.experts else 0

    @property
    def mixer_weights(self) -> int:
        """Number of weights of attention, or what is in its place, in all blocks."""
        states = self.hybrid.mamba * self.hybrid.weights(self.hidden) if self.hybrid else 0
        return self.attentions * self.attention_weights + states

    @property
    def token_products(self) -> int:
        """Multiplications for a token in all layers, but for those of attention: weights, and states."""
        return self.layer_weights + (self.hybrid.mamba * self.hybrid.state_products if self.hybrid else 0)

    @property
    def layer_weights(self) -> int:
        """Number of weights in all layers that multiply a token, without biases and norms."""
        return self.mixer_weights + self.mlp_weights(self.chosen)

    def mlp_weights(self, experts: int) -> int:
        """Number of weights in the feed-forward layers of all blocks, routers included, with this many experts of each
        mixture."""
        matrices = 3 if self.gated else 2
        if not self.experts and not self.hybrid:
            return self.layers * self.intermediate * self.hidden * matrices
        routed = experts * self.intermediate * (self.outer or self.hidden)
        mixture = self.hidden * (self.experts + 2 * self.outer) + (self.shared * self.hidden + routed) * matrices
        return self.mixtures * mixture + self.dense * self.dense_inner * self.hidden * matrices

    @property
    def undivided_weights(self) -> int:
        """Number of weights in all layers that tensor-parallel ranks do not divide: routers, and what makes latents or
        is beside experts."""
        sizes = self.latent
        latents = sizes.query + sizes.key_value + sizes.rotary if sizes else 0
        return self.hidden * (self.layers * latents + self.mixtures * (self.experts + 2 * self.outer))

    @property
    def logit_weights(self) -> int:
        """Number of weights in the output embedding."""
        return self.hidden * self.vocab


_LATENT = {
    "kv_lora_rank": "key_value",
    "qk_nope_head_dim": "plain",
    "qk_rope_head_dim": "rotary",
    "v_head_dim": "value",
}


_HYBRID = {  # the keys of NemotronH's sizes; of Mamba-2 first
    "mamba_num_heads": "heads",
    "n_groups": "groups",
    "ssm_state_size": "state",
    "conv_kernel": "kernel",
}
_HYBRID_SIZES = ("hidden_size", "num_attention_heads", "head_dim", "vocab_size", "mamba_head_dim")
_KINDS = {
    "M": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "E": "moe",
}


def block_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return what each block of a NemotronH is: "mamba", "attention", "mlp" or "moe", or the config's name of another
    kind; none if the config does not say."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    named = next((config[name] for name in names if config.get(name)), ())
    return [_KINDS.get(name, name) for name in named]


def _hybrid(config: Mapping[str, Any]) -> Transformer:
    if not (kinds := block_kinds(config)):
        raise ValueError("the config has no layers_block_type")
    names = [*_HYBRID_SIZES, *_HYBRID]
    names += ["intermediate_size"] if "mlp" in kinds else []
    mixture = "moe" in kinds
    if mixture:
        names += [
            "n_routed_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ]
    if missing := [name for name in names if not config.get(name)]:
        raise ValueError(f"the config has no {', '.join(missing)}")
    size = {name: int(config[name]) for name in names}
    return Transformer(
        layers=len(kinds),
        hidden=size["hidden_size"],
        intermediate=size["moe_intermediate_size"] if mixture else 0,
        heads=size["num_attention_heads"],
        kv_heads=int(config.get("num_key_value_heads") or size["num_attention_heads"]),
        head_dim=size["head_dim"],
        vocab=size["vocab_size"],
        gated=False,
        experts=size["n_routed_experts"] if mixture else 0,
        chosen=size["num_experts_per_tok"] if mixture else 1,
        shared=size["moe_shared_expert_intermediate_size"] if mixture else 0,
        outer=int(config.get("moe_latent_size") or 0) if mixture else 0,
        dense=kinds.count("mlp"),
        dense_inner=size.get("intermediate_size", 0),
        hybrid=Hybrid(
            attention=kinds.count("attention"),
            mamba=kinds.count("mamba"),
            mixtures=kinds.count("moe"),
            channels=size["mamba_num_heads"] * size["mamba_head_dim"],
            **{own: size[name] for name, own in _HYBRID.items()},
        ),
    )


def _first_and_shared(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """The number of blocks before a mixture, their inner size, and that of the mixture's shared experts."""
    if config.get("model_type") not in _SHARED:
        return 0, 0, 0
    dense = min(int(config.get("first_k_dense_replace") or 0), int(config["num_hidden_layers"]))
    if dense and not config.get("intermediate_size"):
        raise ValueError("the config has no intermediate_size")
    shared = int(config["moe_intermediate_size"]) * int(config.get("n_shared_experts") or 0)
    return dense, int(config["intermediate_size"]) if dense else 0, shared


def inner_size(config: Mapping[str, Any]) -> str:
    """Return the name under which a config has the inner size of a feed-forward layer, or of an expert. Raises
    ValueError for a mixture whose layers differ."""
    return _experts(config)[1]


def _experts(config: Mapping[str, Any]) -> tuple[int, str]:
    """The experts of a layer, 0 without a mixture, and the name under which the config has the size of one."""
    experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    if not experts:
        return 0, "intermediate_size"
    alike = not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1
    if config.get("model_type") not in _MIXTURES or not alike:
        raise ValueError(f"{experts} experts: not a mixture with the same experts, and no others, in each layer")
    return experts, _MIXTURES[config["model_type"]]


def model_flops(
    shape: Transformer,
    lengths: Sequence[int],
    *,
    training: bool,
    logits: Sequence[int] | None = None,
    causal: bool = True,
    frozen: bool = False,
) -> float:
    """Return the operations of a forward pass over sequences of `lengths` tokens; with `training`, also of the backward
    pass.

    Forward: 2 per weight and token, and in attention 4 * layers * heads * head_dim per pair of query and key (scores,
    then the weighted sum of values), or 2 * layers * heads * (key + value) where these differ in size. Backward is
    twice forward: one product each for the gradients of inputs and weights.

    logits  number of positions of each sequence whose logits are computed; None is all of them
    causal  count only the n (n + 1) / 2 unmasked pairs; False counts all n^2, as PaLM does and as kernels without a
            causal mask compute
    frozen  the weights have no gradients: an adapter is trained, whose own operations are not counted

    Raises ValueError if a length is negative, or `logits` does not match `lengths`.
    """
    positions = lengths if logits is None else logits
    if len(positions) != len(lengths) or any(not 0 <= p <= n for p, n in zip(positions, lengths)):
        raise ValueError(
            f"logits at {list(positions)[:8]} positions do not fit sequences of {list(lengths)[:8]} tokens"
        )
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    products = 2.0 * (sum(lengths) * shape.token_products + sum(positions) * shape.logit_weights)
    attention = 2.0 * pairs * shape.attentions * shape.pair_products
    if not training:
        return products + attention
    return products * (2 if frozen else 3) + attention * 3


def quadratic_cost(shape: Transformer) -> float:
    """Return q, 1 / tokens, such that the operations of a sequence of n tokens are proportional to n + q n^2.

    q n is the share of causal attention relative to all weights; both are equal at n = 1 / q.
    """
    return shape.attentions * shape.pair_products / 2 / (shape.token_products + shape.logit_weights)


# Dense bfloat16 TFLOP/s, from NVIDIA's data sheets (half of a figure that is given with sparsity). A key lists words of
# the device's name; of the keys whose words are all in the name, the one with the most words applies.
PEAK_TFLOPS: dict[tuple[str, ...], float] = {
    ("A100",): 312.0,
    ("A800",): 312.0,
    ("A10",): 125.0,
    ("A30",): 165.0,
    ("A40",): 149.7,
    ("L4",): 121.0,
    ("L40S",): 362.0,
    ("H100",): 989.0,
    ("H100", "PCIe"): 756.0,
    ("H100", "NVL"): 835.0,
    ("H800",): 989.0,
    ("H800", "PCIe"): 756.0,
    ("H200",): 989.0,
    ("H200", "NVL"): 835.0,
    ("GH200",): 989.0,
    ("B200",): 2250.0,
}


def peak_tflops(device: str) -> float | None:
    """Return the dense bfloat16 TFLOP/s of a GPU, by its name in `torch.cuda.get_device_name()`; None if unknown.

    A slice of a GPU (MIG) counts as unknown: it has only a fraction of the peak.
    """
    words = set(re.split(r"[\s-]+", device))
    matches = [key for key in PEAK_TFLOPS if words.issuperset(key)]
    return None if "MIG" in words or not matches else PEAK_TFLOPS[max(matches, key=len)]
