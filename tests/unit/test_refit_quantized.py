"""A quantized refit: for every pair of layouts, a sampler's memory has the blocks of the whole matrices."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ops.quantize import BLOCK, dequantized, quantized
from ops.refit.layout import Layout, Tensor, dense, whole
from ops.refit.plan import build
from ops.refit.share import Share, digest_of, layout_of
from ops.refit.transports import TRANSPORTS
from pipeline import StageError, WorkerGroup
from pipeline.declare.backend import Backend
from pipeline.declare.task import Task
from stages import Refit
from stages.backends import Route
from stages.backends.megatron import places as megatron
from stages.backends.megatron.names import parameters
from stages.backends.megatron.parts import Part
from stages.backends.model import blocks
from stages.backends.model.decoder import Decoder, Dense, Grouped, Layer, Mlp, Sparse
from stages.backends.model.quantized_folder import quantized_folder
from stages.backends.model.shards import Shards
from stages.backends.refit.source import Source
from stages.backends.refit.target import Target, acknowledged, check_same
from stages.backends.trainer import reduce
from stages.backends.vllm.table import ParameterTable
from tests.unit.refit_models import TRAINING
from tests.unit.test_in_flight import POLICY, context

CPU = torch.device("cpu")


def decoder_of(head_dim: int, mlp: Mlp) -> Decoder:
    mixer = Grouped(heads=8, groups=4, head_dim=head_dim, bias=True, norm=True)
    return Decoder(layers=(Layer(mixer=mixer, mlp=mlp),) * 2, hidden=192, vocab=131, tied=False)


DENSE = decoder_of(64, Dense(inner=256))  # a head ends inside a block, and so does the hidden size
ACROSS = decoder_of(96, Dense(inner=256))  # a group's queries begin inside one block and end inside another
MIXTURE = decoder_of(64, Sparse(experts=4, chosen=2, inner=256))


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
                at = (
                    place.offset // 4,
                    [stop - start for start, stop in place.box],
                    [each // 4 for each in place.strides],
                )
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
    (mixer,) = decoder.mixers
    assert isinstance(mixer, Grouped)
    found, kept = {}, max(1, mixer.groups // ranks)
    first = rank * kept if mixer.groups >= ranks else rank * mixer.groups // ranks
    for suffix, size in (("", 1), (blocks.SUFFIX, BLOCK)):
        for layer in range(len(decoder.layers)):
            at, head = f"model.layers.{layer}.", mixer.head_dim

            def own(name: str, axis: int, at: str = at, suffix: str = suffix) -> torch.Tensor:
                return model[at + name + suffix].chunk(ranks, axis)[rank]

            keys = [
                model[f"{at}self_attn.{letter}_proj.weight{suffix}"][
                    first * head // size : (first + kept) * head // size
                ]
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
        *((ACROSS, training) for training in ("TP1", "TP2", "TP8")),
        *((MIXTURE, training) for training in ("TP1", "TP2", "EP2", "TP2 ETP1 EP2", "TP2 EP2 PP2")),
    ],
)
def test_a_sampler_has_the_blocks_of_whole_matrices(decoder: Decoder, training: str) -> None:
    """For two versions in a row, on one and two ranks, by the table of copies and by whole tensors."""
    models = [model_of(decoder, seed) for seed in (0, 1)]
    for version, shares in enumerate(offered(decoder, TRAINING[training], models)[1:], start=1):
        whole_model = wanted(models[version])
        assert layout_of(shares).tensors == blocks.quantized_tensors(megatron.tensors(decoder, "float32"))
        most = 1 if decoder is ACROSS else 2
        for ranks, transport in ((1, "pull"), (most, "pull"), (most, "golden")):
            for rank, memory in enumerate(received(decoder, ranks, shares, version, transport)):
                expected = loaded(decoder, rank, ranks, whole_model)
                assert [name for name in expected if not same(memory[name], expected[name])] == []
                assert memory["model.norm.weight"].equal(models[version]["model.norm.weight"])
                eight = {name for name, tensor in memory.items() if tensor.dtype == torch.float8_e4m3fn}
                assert eight | {name + blocks.SUFFIX for name in eight} == expected.keys()


def test_rows_that_are_cut_anywhere_give_the_same_version() -> None:
    """As FSDP cuts them."""
    model, tensors, reduce = model_of(MIXTURE, 0), megatron.tensors(MIXTURE, "float32"), together(3)

    def rank(number: int) -> Share:
        held = {name: tensor.chunk(3)[number] for name, tensor in model.items() if len(tensor.chunk(3)) > number}
        first = {name: number * len(tensor.chunk(3)[0]) for name, tensor in model.items()}
        boxes = {name: ((first[name], first[name] + len(own)), *whole(own.shape[1:])) for name, own in held.items()}
        own = [dense(name, box, 4, name) for name, box in boxes.items()]
        return Source(CPU, number, tensors, own, held, quantize=reduce(number)).share(held, TRANSPORTS["pull"])

    with ThreadPoolExecutor(3) as pool:
        assert digest_of(list(pool.map(rank, range(3)))) == digest_of(offered(MIXTURE, TRAINING["TP1"], [model])[0])


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
        lost = sum(
            float((dequantized(made[n], made[n + blocks.SUFFIX]) - model[n]).double().square().sum()) for n in names
        )
        errors[f"quant_error_layer_{layer}"] = (
            lost / sum(float(model[n].double().square().sum()) for n in names)
        ) ** 0.5
    assert errors["quant_error_layer_1"] < 0.85 * errors["quant_error_layer_0"]
    errors["quant_error"] = sum(errors.values()) / 2
    errors["quant_error_worst"] = errors["quant_error_layer_0"]
    for training, shares in found.items():
        for share in shares:
            record = {name: value for name, value in share.record.items() if name.startswith("quant_error")}
            assert record == pytest.approx(errors, rel=1e-6), training


def test_the_wire_carries_half_the_bytes() -> None:
    """Of the matrices of a bfloat16 model: a plan of the same layouts."""
    decoder = replace(decoder_of(64, Dense(inner=4096)), hidden=1024, vocab=1)
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


def of(table: ParameterTable) -> Layout:
    return Layout(table.tensors, [table.places(rank) for rank in range(2)])


def test_what_must_not_be_quantized_is_refused() -> None:
    right = ("model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.experts.w2_weight", "m.o_proj.weight")
    plain = (
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate.weight",
        "m.qkv_proj.bias",
        "m.o_proj.x_scale",
    )
    assert blocks.refused(right, plain) == ""
    for name in plain:
        assert blocks.refused([name], []).startswith(f"{name!r} is an 8-bit float, and only the matrices of") or (
            name == "m.o_proj.x_scale"
        )
    for name in right:
        assert blocks.refused([], [name]).startswith(f"{name!r} is not an 8-bit float")
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.3.mlp.gate.weight"]
    tensors = {name: Tensor((256, 256), "bfloat16") for name in names}
    assert not any(map(blocks.is_quantized, (*names, "q_proj.bias", "model.layers.0.self_attn.q_norm.weight")))
    assert blocks.left_out(tensors) == ["lm_head", "model.embed_tokens", "model.layers.3.mlp.gate"]
    with pytest.raises(ValueError, match=r"no tensor is the weight of a q_proj, .*; there is 'model.embed_tokens"):
        blocks.quantized_tensors(tensors)
    shares = [offered(DENSE, TRAINING["TP1"], [model_of(DENSE, 0)])[0][0]]
    with pytest.raises(StageError, match=r"this model has bfloat16 .* and receives float8_e4m3fn"):
        served = blocks.quantized_tensors(megatron.tensors(DENSE, "float32"))
        served["model.layers.0.mlp.up_proj.weight"] = Tensor((256, 192), "bfloat16")
        check_same(served, layout_of(shares).tensors)


@pytest.mark.parametrize(
    ("decoder", "told"),
    [
        (
            decoder_of(32, Dense(inner=256)),
            "rows and columns 0 to 64 x 0 to 192 of 'model.layers.0.self_attn.k_proj.weight'",
        ),
        (
            decoder_of(64, Dense(inner=128)),
            "rows and columns 0 to 64 x 0 to 192 of 'model.layers.0.mlp.gate_proj.weight'",
        ),
    ],
)
def test_a_sampler_that_would_cut_blocks_is_refused(decoder: Decoder, told: str) -> None:
    with pytest.raises(ValueError, match=f"a rank has {told}, which are not whole blocks"):
        ParameterTable(decoder, 2, torch.bfloat16, quantized=True)


def test_the_stage_has_a_trainer_quantize_for_a_sampler_with_such_weights() -> None:
    learner = WorkerGroup("learner", backend="torch", threads=1)
    sampler = WorkerGroup("sampler", backend="vllm", gpus=1, weights="fp8")
    refit, given = Refit(POLICY, source=learner, target=sampler), []
    meeting: Any = SimpleNamespace(side="source", is_near=True, offer=given.append)
    here = context()
    metrics = refit.setup(here)(meeting, Task(stage="refit", step=0)).metrics
    tensors = layout_of(given).tensors
    assert tensors == blocks.quantized_tensors({n: t for n, t in tensors.items() if not n.endswith(blocks.SUFFIX)})
    layers = [value for name, value in metrics.items() if name.startswith("quant_error_layer_")]
    assert metrics["quant_error"] == pytest.approx(sum(layers) / len(layers)) and max(layers) < 0.04
    assert metrics["quant_error_worst"] == max(layers) and metrics["kept_bytes_source"] > 0
    own = Backend(name="mine", opener="mine:opened", can=("train",))
    problems = list(replace(refit, source=WorkerGroup("learner", backend=own)).check(SimpleNamespace()))  # type: ignore[arg-type]
    assert "stage 'refit' goes from 'mine' to weights='fp8'" in [problem.what for problem in problems]


def test_ranks_of_a_trainer_combine_over_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, how: done.append(how))
    reduce(torch.ones(1), "max")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    reduce(torch.ones(1), "max")
    reduce(torch.ones(1), "sum")
    assert done == [torch.distributed.ReduceOp.MAX, torch.distributed.ReduceOp.SUM]


def test_the_copy_of_a_folder_has_the_same_bytes_and_follows_its_source(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    tensors = {"layers.0.up_proj.weight": torch.randn(130, 70), "lm_head.weight": torch.randn(4, 4)}
    save_file(tensors, folder / "model.safetensors")
    made = quantized_folder(folder, tmp_path)
    assert quantized_folder(folder, tmp_path) == made
    weight, scale = quantized(tensors["layers.0.up_proj.weight"].bfloat16())
    held = load_file(made / "model-00000.safetensors")
    assert same(held["layers.0.up_proj.weight"], weight) and same(held["layers.0.up_proj.weight_scale_inv"], scale)
    assert same(held["lm_head.weight"], tensors["lm_head.weight"]) and len(held) == 3
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    assert Shards(made).files.keys() == held.keys()
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert quantized_folder(folder, tmp_path) != made
