"""Tiny models of several families: their tensors, and the memory of a Megatron rank and a vLLM rank built from them."""

import re
from dataclasses import replace

import numpy as np

from pipeline.declare.ranks import RankLayout
from stages.backends.megatron.names import parameters
from stages.backends.megatron.parts import Part
from stages.backends.model.decoder import Decoder, Dense, Grouped, Latent, Layer, Mixer, Mlp, Sparse, StateSpace
from stages.backends.model.families import HYBRID_NAMES
from stages.backends.model.precision import kept_dtype

GROUPED = Grouped(heads=8, groups=4, head_dim=6)
DENSE, MIXTURE = Dense(inner=24), Sparse(experts=4, chosen=2, inner=24)
LATENT = Latent(heads=8, query=10, key_value=6, plain=4, rotary=2, value=6)
SIGMOID = replace(MIXTURE, sigmoid=True, shared=16)
STATE = StateSpace(heads=16, head_dim=2, groups=8, state=3, kernel=4)


def decoder(*layers: Layer, tied: bool) -> Decoder:
    return Decoder(layers=layers, hidden=8, vocab=131, tied=tied)


def layer(mixer: Mixer | None, mlp: Mlp | None = DENSE) -> Layer:
    return Layer(mixer=mixer, mlp=mlp)


def hybrid(state: StateSpace) -> Decoder:
    parts = (layer(state, None), layer(None, replace(DENSE, gated=False)), layer(GROUPED, None), layer(state, None))
    return replace(decoder(*parts, tied=False), renamed=HYBRID_NAMES)


FAMILIES = {
    "llama": decoder(*[layer(GROUPED)] * 4, tied=False),
    "qwen2": decoder(*[layer(replace(GROUPED, bias=True))] * 4, tied=True),
    "qwen3": decoder(*[layer(replace(GROUPED, norm=True))] * 4, tied=True),
    "qwen3_moe": decoder(*[layer(replace(GROUPED, norm=True), MIXTURE)] * 4, tied=False),
    "qwen2, uneven": decoder(*[layer(replace(GROUPED, groups=1, head_dim=8, bias=True))] * 3, tied=True),
    "glm4_moe": decoder(layer(GROUPED), *[layer(replace(GROUPED, bias=True, norm=True), SIGMOID)] * 2, tied=False),
    "deepseek_v3": decoder(layer(LATENT), layer(LATENT, SIGMOID), layer(replace(LATENT, query=0), SIGMOID), tied=False),
    "nemotron_h": hybrid(STATE),
    "nemotron_h, experts": replace(
        decoder(
            layer(STATE, None), layer(None, replace(SIGMOID, gated=False, latent=6)), layer(GROUPED, None), tied=False
        ),
        renamed=HYBRID_NAMES,
    ),
    "nemotron_h, 1 group": hybrid(replace(STATE, groups=1)),
}
LOADED = (".A_log", ".D", ".dt_bias", ".conv1d.weight", ".conv1d.bias")  # of a Mamba layer: without a place in vLLM


def split(layout: RankLayout, experts: int = 1, expert_tensors: int | None = None) -> list[Part]:
    """Return the parts of all ranks of a training layout."""
    return [Part.of(rank, layout, experts, expert_tensors or layout.tensor) for rank in range(layout.size)]


TRAINING = {
    "TP1": split(RankLayout()),
    "TP2": split(RankLayout(tensor=2)),
    "TP8": split(RankLayout(tensor=8)),  # more ranks than key-value heads
    "PP2": split(RankLayout(pipeline=2)),
    "PP3": split(RankLayout(pipeline=3)),
    "DP2": split(RankLayout(data=2)),
    "TP2 PP2": split(RankLayout(tensor=2, pipeline=2)),
    "EP2": split(RankLayout(data=2), experts=2),
    "TP2 ETP1": split(RankLayout(tensor=2), expert_tensors=1),
    "TP2 ETP1 EP2": split(RankLayout(tensor=2), experts=2, expert_tensors=1),
    "TP2 EP2 PP2": split(RankLayout(data=2, tensor=2, pipeline=2), experts=2),
    "TP2 ETP1 EP4 PP3": split(RankLayout(data=2, tensor=2, pipeline=3), experts=4, expert_tensors=1),
}
SERVING = {"TP1": (1, 1), "TP2": (2, 1), "DP2": (1, 2), "TP8": (8, 1)}  # ranks per replica, replicas
ITEM = 2


def fits(family: str, training: str) -> bool:
    """Return whether a family can be trained that way: only a mixture has experts to divide, and ranks hold whole
    groups of Mamba heads."""
    divides = not family.endswith("1 group") or not training.startswith(("TP2", "TP8"))
    return divides and (FAMILIES[family].experts > 0 or "EP" not in training.replace("ETP", "EP"))


def unit(dtype: str) -> type:
    """Return the integers that stand for numbers of a dtype; "" is a dtype of two bytes."""
    return np.uint32 if dtype == "float32" else np.uint16


def size(buffer: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a buffer of a vLLM rank."""
    return int(np.prod(shape)) * unit(kept_dtype(buffer))().itemsize


def folder(decoder: Decoder) -> dict[str, np.ndarray]:
    """Return distinct values for every tensor, by its Hugging Face name."""
    found: dict[str, np.ndarray] = {}
    for parameter in parameters(decoder, Part()).values():
        for piece in parameter.pieces:
            if piece.name not in found:
                values = np.arange(int(np.prod(piece.shape))) + 7919 * len(found)
                found[piece.name] = values.astype(unit(parameter.dtype)).reshape(piece.shape)
    return found


def trained(decoder: Decoder, part: Part, model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a Megatron rank's memory after loading a model folder."""
    memory = {}
    for name, parameter in parameters(decoder, part).items():
        memory[name] = np.full(parameter.shape, 0xDEAD, unit(parameter.dtype))
        for piece in parameter.pieces:
            memory[name][piece.inside] = model[piece.name][piece.box]
    return memory


def served(decoder: Decoder, rank: int, ranks: int, model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a vLLM rank's memory after loading a folder, but for latent attention, whose weights have no place;
    reimplements vLLM's slicing. Padding is poison."""
    share = -(-decoder.vocab // 64) * 64 // ranks

    def part(tensor: np.ndarray, axis: int) -> np.ndarray:
        return np.split(tensor, ranks, axis)[rank]

    memory = {}
    for name, tensor in model.items():
        number = re.search(r"layers\.(\d+)\.", name)
        mixer = decoder.layers[int(number[1])].mixer if number else None
        if isinstance(mixer, Latent) and ".self_attn." in name:
            continue
        if name.endswith(LOADED):
            continue
        if name.endswith((".in_proj.weight", ".mixer.norm.weight")):
            assert isinstance(mixer, StateSpace)
            if name.endswith(".norm.weight"):
                memory[name] = part(tensor, 0)
                continue
            gate, x, b, c, step = np.split(tensor, np.cumsum(mixer.projected)[:-1])
            both = [b, c] if mixer.groups == 1 else [part(b, 0), part(c, 0)]
            memory[name] = np.concatenate([part(gate, 0), part(x, 0), *both, part(step, 0)])
        elif name.endswith(("embed_tokens.weight", "embeddings.weight", "lm_head.weight")):
            memory[name] = np.full((share, decoder.hidden), 0xEEEE, np.uint16)
            mine = tensor[share * rank : share * (rank + 1)]
            memory[name][: len(mine)] = mine
        elif name.endswith(("norm.weight", "norm_f.weight", ".gate.weight", "correction_bias", "latent_proj.weight")):
            memory[name] = tensor
        elif ".q_proj." in name:
            assert isinstance(mixer, Grouped)
            kept = 1 if mixer.groups < ranks else mixer.groups // ranks
            first = rank // (ranks // mixer.groups) if mixer.groups < ranks else rank * kept
            queries, keys, values = (
                model[name.replace(".q_proj.", f".{letter}_proj.")].reshape(heads, mixer.head_dim, *tensor.shape[1:])
                for letter, heads in zip("qkv", (mixer.heads, mixer.groups, mixer.groups))
            )
            own = [part(queries, 0), keys[first : first + kept], values[first : first + kept]]
            memory[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(own).reshape(-1, *tensor.shape[1:])
        elif name.endswith((".mixer.up_proj.weight", ".mixer.shared_experts.up_proj.weight")):
            memory[name] = part(tensor, 0)
        elif "o_proj" in name or "out_proj" in name or ("down_proj" in name and ".experts." not in name):
            memory[name] = part(tensor, 1)
        elif name.endswith(("mlp.gate_proj.weight", "shared_experts.gate_proj.weight")):
            up = model[name.replace("gate_proj", "up_proj")]
            memory[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([part(tensor, 0), part(up, 0)])
        elif ".mixer.experts.0.up_proj" in name:
            prefix = name.partition(".experts.")[0] + ".experts."
            up, down = (
                np.stack([model[f"{prefix}{e}.{p}_proj.weight"] for e in range(decoder.experts)])
                for p in ("up", "down")
            )
            memory[f"{prefix}w13_weight"], memory[f"{prefix}w2_weight"] = part(up, 1), part(down, 2)
        elif ".experts.0.gate_proj" in name:
            prefix = name.partition(".experts.")[0] + ".experts."
            gate, up, down = (
                np.stack([model[f"{prefix}{e}.{p}_proj.weight"] for e in range(decoder.experts)])
                for p in ("gate", "up", "down")
            )
            memory[f"{prefix}w13_weight"] = np.concatenate([part(gate, 1), part(up, 1)], 1)
            memory[f"{prefix}w2_weight"] = part(down, 2)
    theirs = {"backbone.": "model.", ".embeddings.": ".embed_tokens."}
    for mine, own in theirs.items():
        memory = {name.replace(mine, own): tensor for name, tensor in memory.items()}
    return memory
