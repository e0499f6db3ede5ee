"""Tiny models of four families: their tensors, and the memory of a Megatron rank and a vLLM rank built from them."""

import numpy as np

from pipeline.declare.ranks import RankLayout
from stages.backends.megatron.names import parameters
from stages.backends.megatron.parts import Part
from stages.backends.model.decoder import Decoder

COMMON = {"layers": 4, "hidden": 8, "vocab": 131, "heads": 8, "groups": 4, "head_dim": 6, "intermediate": 24}
FAMILIES = {
    "llama": Decoder(**COMMON, tied=False, qkv_bias=False, qk_norm=False),
    "qwen2": Decoder(**COMMON, tied=True, qkv_bias=True, qk_norm=False),
    "qwen3": Decoder(**COMMON, tied=True, qkv_bias=False, qk_norm=True),
    "qwen3_moe": Decoder(**COMMON, tied=False, qkv_bias=False, qk_norm=True, experts=4, chosen=2),
    "qwen2, uneven": Decoder(
        **COMMON | {"layers": 3, "groups": 1, "head_dim": 8}, tied=True, qkv_bias=True, qk_norm=False
    ),
}


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
    """Return whether a family can be trained that way: only a mixture has experts to divide."""
    return FAMILIES[family].experts > 0 or "EP" not in training.replace("ETP", "EP")


def folder(decoder: Decoder) -> dict[str, np.ndarray]:
    """Return distinct values for every tensor, by its Hugging Face name."""
    found: dict[str, np.ndarray] = {}
    for parameter in parameters(decoder, Part()).values():
        for piece in parameter.pieces:
            if piece.name not in found:
                size = int(np.prod(piece.shape))
                found[piece.name] = (np.arange(size) + 7919 * len(found)).astype(np.uint16).reshape(piece.shape)
    return found


def trained(decoder: Decoder, part: Part, model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a Megatron rank's memory after loading a model folder."""
    memory = {}
    for name, parameter in parameters(decoder, part).items():
        memory[name] = np.full(parameter.shape, 0xDEAD, np.uint16)
        for piece in parameter.pieces:
            memory[name][piece.inside] = model[piece.name][piece.box]
    return memory


def served(decoder: Decoder, rank: int, ranks: int, model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a vLLM rank's memory after loading a folder; reimplements vLLM's slicing. Padding is poison."""
    share = -(-decoder.vocab // 64) * 64 // ranks
    kept = 1 if decoder.groups < ranks else decoder.groups // ranks
    first = rank // (ranks // decoder.groups) if decoder.groups < ranks else rank * kept

    def rows(tensor: np.ndarray, start: int, stop: int) -> np.ndarray:
        return tensor[start * decoder.head_dim : stop * decoder.head_dim]

    def part(tensor: np.ndarray, axis: int) -> np.ndarray:
        return np.split(tensor, ranks, axis)[rank]

    memory = {}
    for name, tensor in model.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            memory[name] = np.full((share, decoder.hidden), 0xEEEE, np.uint16)
            mine = tensor[share * rank : share * (rank + 1)]
            memory[name][: len(mine)] = mine
        elif name.endswith("norm.weight") or name.endswith("mlp.gate.weight"):
            memory[name] = tensor
        elif ".q_proj." in name:
            per = decoder.heads // ranks
            keys, values = (model[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "kv")
            queries = rows(tensor, per * rank, per * (rank + 1))
            own = [queries, rows(keys, first, first + kept), rows(values, first, first + kept)]
            memory[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(own)
        elif "o_proj" in name or ("down_proj" in name and ".experts." not in name):
            memory[name] = part(tensor, 1)
        elif name.endswith("mlp.gate_proj.weight"):
            up = model[name.replace("gate_proj", "up_proj")]
            memory[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([part(tensor, 0), part(up, 0)])
        elif ".experts.0.gate_proj" in name:
            prefix = name.partition(".experts.")[0] + ".experts."
            gate, up, down = (
                np.stack([model[f"{prefix}{e}.{p}_proj.weight"] for e in range(decoder.experts)])
                for p in ("gate", "up", "down")
            )
            memory[f"{prefix}w13_weight"] = np.concatenate([part(gate, 1), part(up, 1)], 1)
            memory[f"{prefix}w2_weight"] = part(down, 2)
    return memory
