"""From Megatron's memory to vLLM's: the plan produces exactly what vLLM's own loader would produce from the folder."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ops.refit.layout import Layout
from ops.refit.plan import build
from stages.backends.megatron import places as megatron
from stages.backends.megatron.parts import Part
from stages.backends.model.decoder import Decoder
from stages.backends.model.experts import of_expert
from stages.backends.vllm import places as vllm
from tests.unit.refit_models import FAMILIES, ITEM, SERVING, TRAINING, fits, folder, served, size, trained
from tests.unit.test_refit_plan import carry_out

CASES = [
    (family, training, serving)
    for family, training, serving in product(FAMILIES, TRAINING, SERVING)
    if fits(family, training)
]


def differing(decoder: Decoder, parts: list[Part], of: list[int], ranks: int, destination: Layout) -> set[str]:
    """Execute the plan between poisoned buffers and return the parameters that differ from vLLM's own loader."""
    model = folder(decoder)
    source = Layout(destination.tensors, [megatron.places(decoder, part, ITEM) for part in parts])
    given = [{name: a.view(np.uint8).ravel() for name, a in trained(decoder, p, model).items()} for p in parts]
    shapes = vllm.shapes(decoder, ranks)
    taken = [{name: np.full(size(name, shape), 0xEE, np.uint8) for name, shape in shapes.items()} for _ in of]
    carry_out(build(source, destination, segment_bytes=512), given, taken)
    found = set()
    for rank, memory in zip(of, taken):
        wanted = served(decoder, rank, ranks, model)
        assert {name: array.shape for name, array in wanted.items()} == shapes
        for name, array in wanted.items():
            if (memory[name].view(array.dtype).reshape(shapes[name]) != array).any():
                found.add(name)
    return found


@pytest.mark.parametrize(("family", "training", "serving"), CASES)
def test_vllm_gets_what_its_own_loader_would_have_made(family: str, training: str, serving: str) -> None:
    decoder, parts, (ranks, replicas) = FAMILIES[family], TRAINING[training], SERVING[serving]
    tensors = megatron.tensors(decoder, "bfloat16")
    assert {of_expert(name)[0] for name in folder(decoder)} == tensors.keys()
    of = [rank for _ in range(replicas) for rank in range(ranks)]
    destination = Layout(tensors, [vllm.places(decoder, rank, ranks, ITEM) for rank in of])
    assert vllm.tensors(decoder, "bfloat16").items() <= tensors.items()
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
