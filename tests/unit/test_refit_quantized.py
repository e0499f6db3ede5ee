"""A quantized refit: for every pair of layouts, a sampler's memory has the blocks of the whole matrices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ops.quantize import BLOCK, dequantized, quantized
from ops.refit.layout import Tensor, dense, whole
from ops.refit.ledger import Ledger
from ops.refit.share import Share, digest_of, layout_of
from ops.refit.plan import build
from ops.refit.transports import TRANSPORTS, Gloo
from pipeline.declare.ranks import RankLayout
from stages.backends import Route
from stages.backends.megatron import places as megatron
from stages.backends.megatron.names import parameters
from stages.backends.megatron.parts import Part
from stages.backends.model import blocks
from stages.backends.model.decoder import Decoder
from stages.backends.refit.source import Source
from stages.backends.refit.target import Target, acknowledged
from stages.backends.vllm.table import ParameterTable
from tests.unit.refit_models import TRAINING

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "layers": 2, "hidden": 192, "vocab": 131, "heads": 8, "groups": 4, "head_dim": 64, "intermediate": 256,
    "tied": False, "qkv_bias": True, "qk_norm": True,
}  # fmt: skip
DENSE = Decoder(**COMMON)  # a head ends inside a block, and so does the hidden size
MIXTURE = Decoder(**COMMON, experts=4, chosen=2)


def model_of(decoder: Decoder, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a model, as bfloat16 could hold them."""
    random = torch.Generator().manual_seed(seed)
    tensors = megatron.tensors(decoder, "float32")
    return {name: torch.randn(each.shape, generator=random).bfloat16().float() for name, each in tensors.items()}


def wanted(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the quantized model, each whole."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in model.items():
        if blocks.is_quantized(name):
            parts = [quantized(matrix) for matrix in tensor.view(-1, *tensor.shape[-2:])]
            made[name] = torch.stack([weight for weight, _ in parts]).view(tensor.shape)
            made[name + blocks.SUFFIX] = torch.stack([scale for _, scale in parts]).view(blocks.grid(tensor.shape))
        else:
            made[name] = tensor
    return made


def together(count: int) -> Callable[[int], Any]:
    """Return, for each of several ranks in threads, what combines their tensors."""
    barrier, given = threading.Barrier(count), [torch.empty(0)] * count

    def of(rank: int) -> Any:
        def reduce(tensor: torch.Tensor, how: str) -> None:
            given[rank] = tensor.clone()
            barrier.wait(60)
            every = torch.stack(given)
            tensor.copy_(every.amax(0) if how == "max" else every.sum(0))
            barrier.wait(60)

        return reduce

    return of


def offered(decoder: Decoder, parts: Sequence[Part], models: Sequence[dict[str, torch.Tensor]]) -> list[list[Share]]:
    """Return the shares of all ranks of a training layout, for each model."""
    reduce, tensors = together(len(parts)), megatron.tensors(decoder, "float32")

    def rank(number: int) -> list[Share]:
        part, own = parts[number], megatron.places(decoder, parts[number], 4)
        held = {name: torch.zeros(each.shape) for name, each in parameters(decoder, part).items()}
        source = Source(CPU, number, tensors, own, held, quantize=reduce(number))
        shares = []
        for model in models:
            for place in own:
                at = place.offset // 4, [stop - start for start, stop in place.box], [each // 4 for each in place.strides]
                held[place.buffer].as_strided(at[1], at[2], at[0]).copy_(model[place.tensor][index(place.box)])
            shares.append(source.share(held, TRANSPORTS["pull"]))
        return shares

    with ThreadPoolExecutor(len(parts)) as pool:
        return [list(shares) for shares in zip(*pool.map(rank, range(len(parts))))]


def index(box: Any) -> tuple[slice, ...]:
    return tuple(slice(*edges) for edges in box)


def received(decoder: Decoder, ranks: int, shares: Sequence[Share], version: int, transport: str) -> list[Any]:
    """Return the memory of a sampler's ranks, by vLLM's names, and check what they acknowledge."""
    table = ParameterTable(decoder, ranks, torch.float32, quantized=True)
    memory, summed = [], []
    for rank in range(ranks):
        held = {name: torch.zeros(shape, dtype=table.dtypes[name]) for name, shape in table.shapes.items()}
        target = Target(table.tensors, [table.places(each) for each in range(ranks)], rank, held)
        summed.append(target.receive(shares, version, Route(TRANSPORTS[transport])).summed)
        memory.append(held)
    assert acknowledged(shares, summed) == digest_of(shares)
    return memory


def loaded(decoder: Decoder, rank: int, ranks: int, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the quantized parameters of a vLLM rank, by slices of whole tensors as vLLM's loader takes them."""
    found, kept = {}, max(1, decoder.groups // ranks)
    first = rank * kept if decoder.groups >= ranks else rank * decoder.groups // ranks
    for suffix, size in (("", 1), (blocks.SUFFIX, BLOCK)):
        for layer in range(decoder.layers):
            at, head = f"model.layers.{layer}.", decoder.head_dim

            def own(name: str, axis: int) -> torch.Tensor:
                return model[at + name + suffix].chunk(ranks, axis)[rank]

            keys = [
                model[f"{at}self_attn.{letter}_proj.weight{suffix}"][first * head // size : (first + kept) * head // size]
                for letter in "kv"
            ]
            qkv = torch.cat([own("self_attn.q_proj.weight", 0), *keys])
            found[f"{at}self_attn.qkv_proj.weight{suffix}"] = qkv
            found[f"{at}self_attn.o_proj.weight{suffix}"] = own("self_attn.o_proj.weight", 1)
            if decoder.experts:
                both = [own(f"mlp.experts.*.{part}_proj.weight", 1) for part in ("gate", "up")]
                found[f"{at}mlp.experts.w13_weight{suffix}"] = torch.cat(both, 1)
                found[f"{at}mlp.experts.w2_weight{suffix}"] = own("mlp.experts.*.down_proj.weight", 2)
            else:
                both = [own(f"mlp.{part}_proj.weight", 0) for part in ("gate", "up")]
                found[f"{at}mlp.gate_up_proj.weight{suffix}"] = torch.cat(both)
                found[f"{at}mlp.down_proj.weight{suffix}"] = own("mlp.down_proj.weight", 1)
    return found


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("decoder", "training"),
    [
        *((DENSE, training) for training in ("TP1", "TP2", "TP8", "PP2", "DP2", "TP2 PP2")),
        *((MIXTURE, training) for training in ("TP1", "TP2", "EP2", "TP2 ETP1 EP2", "TP2 EP2 PP2")),
    ],
)
def test_a_sampler_has_the_blocks_of_whole_matrices(decoder: Decoder, training: str) -> None:
    """For two versions in a row, on one and two ranks, by the table of copies and by whole tensors."""
    models = [model_of(decoder, seed) for seed in (0, 1)]
    for version, shares in enumerate(offered(decoder, TRAINING[training], models)[1:], start=1):
        whole_model = wanted(models[version])
        assert layout_of(shares).tensors == blocks.quantized_tensors(megatron.tensors(decoder, "float32"))
        for ranks, transport in ((1, "pull"), (2, "pull"), (2, "golden")):
            for rank, memory in enumerate(received(decoder, ranks, shares, version, transport)):
                expected = loaded(decoder, rank, ranks, whole_model)
                assert [name for name in expected if not same(memory[name], expected[name])] == []
                assert memory["model.norm.weight"].equal(models[version]["model.norm.weight"])
                eight = {name for name, tensor in memory.items() if tensor.dtype == torch.float8_e4m3fn}
                assert eight | {name + blocks.SUFFIX for name in eight} == expected.keys()


def test_the_record_has_the_error_of_each_layer_whatever_the_division() -> None:
    model = model_of(DENSE, 0)
    for name in model:
        if ".layers.1.mlp" in name:
            model[name] = model[name].sign()  # without an error
    found = {training: offered(DENSE, TRAINING[training], [model])[0] for training in ("TP1", "TP2", "PP2", "DP2")}
    errors = {}
    for layer in ("0", "1"):
        names = [name for name in model if blocks.is_quantized(name) and f".layers.{layer}." in name]
        made = wanted(model)
        lost = sum(float((dequantized(made[n], made[n + blocks.SUFFIX]) - model[n]).double().square().sum()) for n in names)
        errors[f"quant_error_layer_{layer}"] = (lost / sum(float(model[n].double().square().sum()) for n in names)) ** 0.5
    assert errors["quant_error_layer_1"] < 0.85 * errors["quant_error_layer_0"]
    errors["quant_error"] = sum(errors.values()) / 2
    errors["quant_error_worst"] = errors["quant_error_layer_0"]
    for training, shares in found.items():
        for share in shares:
            record = {name: value for name, value in share.record.items() if name.startswith("quant_error")}
            assert record == pytest.approx(errors, rel=1e-6), training


def test_the_wire_carries_half_the_bytes() -> None:
    """Of the matrices of a bfloat16 model: a plan of the same layouts."""
    decoder = replace(DENSE, hidden=1024, vocab=1, intermediate=4096)
    part, plain = Part(), megatron.tensors(decoder, "bfloat16")
    own, table = megatron.places(decoder, part, 2), ParameterTable(decoder, 2, torch.bfloat16, quantized=False)
    held = {name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in parameters(decoder, part).items()}
    source = Source(CPU, 0, plain, own, held, quantize=lambda tensor, how: None)
    share = source.share(held, TRANSPORTS["pull"])
    halves = ParameterTable(decoder, 2, torch.bfloat16, quantized=True)
    before = build(layout_of([Source(CPU, 0, plain, own, held).share(held, TRANSPORTS["pull"])]), of(table)).received
    after = build(layout_of([share]), of(halves)).received
    assert after.sum() / before.sum() == pytest.approx(0.5 + 1 / 8192, abs=3e-4)
    assert share.model_bytes == sum(each.item_bytes * prod(each.shape) for each in halves.tensors.values())


def of(table: ParameterTable) -> Any:
    from ops.refit.layout import Layout

    return Layout(table.tensors, [table.places(rank) for rank in range(2)])
