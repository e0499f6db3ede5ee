"""From Megatron's memory into vLLM's: what the plan moves is what vLLM's own loader would have made of the folder."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ops.refit.layout import Layout
from ops.refit.plan import build
from stages.backends.experts import of_expert
from stages.backends.megatron import places as megatron
from stages.backends.megatron.names import Part, parameters
from stages.backends.megatron.shape import Decoder
from stages.backends.vllm import places as vllm
from tests.unit.test_refit_plan import carry_out

COMMON = {"layers": 4, "hidden": 8, "vocab": 131, "heads": 8, "groups": 4, "head_dim": 6, "intermediate": 24}
FAMILIES = {
    "llama": Decoder(**COMMON, tied=False, qkv_bias=False, qk_norm=False),
    "qwen2": Decoder(**COMMON, tied=True, qkv_bias=True, qk_norm=False),
    "qwen3": Decoder(**COMMON, tied=True, qkv_bias=False, qk_norm=True),
    "qwen3_moe": Decoder(**COMMON, tied=False, qkv_bias=False, qk_norm=True, experts=4, chosen=2),
}
TRAINING = {
    "TP1": [Part()],
    "TP2": [Part(tensor=t, tensors=2) for t in range(2)],
    "PP2": [Part(stage=s, stages=2) for s in range(2)],
    "DP2": [Part(), Part()],
    "TP2 PP2": [Part(tensor=t, tensors=2, stage=s, stages=2) for s, t in product(range(2), repeat=2)],
    "EP2": [Part(expert=e, experts=2) for e in range(2)],
}
SERVING = {"TP1": (1, 1), "TP2": (2, 1), "DP2": (1, 2), "TP8": (8, 1)}  # ranks of a replica, replicas
ITEM = 2


def folder(decoder: Decoder) -> dict[str, np.ndarray]:
    """Numbers for every tensor, by Hugging Face's names."""
    found: dict[str, np.ndarray] = {}
    for parameter in parameters(decoder, Part()).values():
        for piece in parameter.pieces:
            if piece.name not in found:
                size = int(np.prod(piece.shape))
                found[piece.name] = (np.arange(size) + 7919 * len(found)).astype(np.uint16).reshape(piece.shape)
    return found


def trained(decoder: Decoder, part: Part, model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A rank's memory, as loading a folder leaves it."""
    memory = {}
    for name, parameter in parameters(decoder, part).items():
        memory[name] = np.full(parameter.shape, 0xDEAD, np.uint16)
        for piece in parameter.pieces:
            memory[name][piece.inside] = model[piece.name][piece.box]
    return memory


def served(decoder: Decoder, rank: int, ranks: int, model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A rank's memory as vLLM's layers cut it out of a folder, written here once more; padding is poison."""
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


CASES = [
    (family, training, serving)
    for family, training, serving in product(FAMILIES, TRAINING, SERVING)
    if training != "EP2" or FAMILIES[family].experts
]


def differing(decoder: Decoder, parts: list[Part], of: list[int], ranks: int, destination: Layout) -> set[str]:
    """Carry the plan out between poisoned buffers; the parameters that are not what vLLM's loader would have made."""
    model = folder(decoder)
    source = Layout(destination.tensors, [megatron.places(decoder, part, ITEM) for part in parts])
    given = [{name: a.view(np.uint8).ravel() for name, a in trained(decoder, p, model).items()} for p in parts]
    shapes = vllm.shapes(decoder, ranks)
    taken = [{name: np.full(int(np.prod(shape)) * ITEM, 0xEE, np.uint8) for name, shape in shapes.items()} for _ in of]
    carry_out(build(source, destination, segment_bytes=512), given, taken)
    found = set()
    for rank, memory in zip(of, taken):
        wanted = served(decoder, rank, ranks, model)
        assert {name: array.shape for name, array in wanted.items()} == shapes
        for name, array in wanted.items():
            if (memory[name].view(np.uint16).reshape(shapes[name]) != array).any():
                found.add(name)
    return found


@pytest.mark.parametrize(("family", "training", "serving"), CASES)
def test_vllm_gets_what_its_own_loader_would_have_made(family: str, training: str, serving: str) -> None:
    decoder, parts, (ranks, replicas) = FAMILIES[family], TRAINING[training], SERVING[serving]
    tensors = megatron.tensors(decoder, "bfloat16")
    assert {of_expert(name)[0] for name in folder(decoder)} == tensors.keys()
    of = [rank for _ in range(replicas) for rank in range(ranks)]
    destination = Layout(tensors, [vllm.places(decoder, rank, ranks, ITEM) for rank in of])
    assert differing(decoder, parts, of, ranks, destination) == set()


@pytest.mark.parametrize(
    ("family", "first", "second", "told"),
    [
        ("llama", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.gate_up_proj.weight"),
        ("qwen2", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.qkv_proj.bias"),
        ("qwen3", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.qkv_proj.weight"),
        ("qwen3_moe", "mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight", "mlp.experts.w13_weight"),
    ],
)
def test_tensors_in_each_others_place_are_seen(family: str, first: str, second: str, told: str) -> None:
    decoder = FAMILIES[family]
    swap = {
        f"model.layers.1.{first}": f"model.layers.1.{second}",
        f"model.layers.1.{second}": f"model.layers.1.{first}",
    }
    ranks = [
        [replace(place, tensor=swap.get(place.tensor, place.tensor)) for place in vllm.places(decoder, rank, 2, ITEM)]
        for rank in range(2)
    ]
    destination = Layout(megatron.tensors(decoder, "bfloat16"), ranks)
    assert differing(decoder, TRAINING["TP2"], [0, 1], 2, destination) == {f"model.layers.1.{told}"}
