"""Parameter tables, config parsing and refusals of the Megatron backend: arithmetic, without an engine."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pipeline import Model, StageError, WorkerGroup
from pipeline.declare.ranks import RankLayout
from stages import backends
from stages.backends.megatron.limits import UNSIZED, fits, problems
from stages.backends.megatron.names import parameters, plain_names
from stages.backends.megatron.parts import Part, stage_layers
from stages.backends.model.decoder import Decoder, Dense, Grouped, Latent, Layer, Rope, Sparse, StateSpace
from stages.backends.model.families import decoder_of
from stages.forecast.shape import divided
from tests.unit.test_folder import DEEPSEEK, GLM
from tests.unit.test_folder import MIXTURE as SMALL_MIXTURE

GROUPED = Grouped(heads=8, groups=4, head_dim=6, bias=True, norm=True)
DENSE = Decoder(layers=(Layer(mixer=GROUPED, mlp=Dense(inner=24)),) * 4, hidden=16, vocab=131, tied=True)
MIXTURE = Decoder(
    layers=(Layer(mixer=Grouped(heads=4, groups=4, head_dim=4, norm=True), mlp=Sparse(experts=4, chosen=2, inner=8)),)
    * 2,
    hidden=16,
    vocab=64,
    tied=False,
)
LATENT = Latent(heads=4, query=12, key_value=8, plain=4, rotary=2, value=6)
SIGMOID = Sparse(experts=4, chosen=2, inner=8, sigmoid=True, divisions=2, scale=2.5, shared=8)
MIXED = Decoder(  # layers that differ
    layers=(
        Layer(mixer=LATENT, mlp=Dense(inner=24)),
        Layer(mixer=replace(LATENT, query=0), mlp=SIGMOID),
        Layer(mixer=replace(GROUPED, heads=4), mlp=SIGMOID),
    ),
    hidden=16,
    vocab=131,
    tied=False,
)
STATE = StateSpace(heads=8, head_dim=2, groups=4, state=3, kernel=4)
HYBRID = Decoder(  # layers with one part
    layers=(
        Layer(mixer=STATE, mlp=None),
        Layer(mixer=None, mlp=Dense(inner=24, gated=False)),
        Layer(mixer=GROUPED, mlp=None),
    ),
    hidden=16,
    vocab=131,
    tied=False,
)
TENSORS = {DENSE: 14 * 4 + 2, MIXTURE: 21 * 2 + 3, MIXED: 12 + 23 + 29 + 3, HYBRID: 9 + 3 + 10 + 3}  # of the folder
QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


DIVISIONS = [  # tensor, pipeline and data parallel, experts, ranks per expert
    *((DENSE, tensor, pipeline, 1, 1, tensor) for tensor, pipeline in product((1, 2, 4, 8), (1, 2, 3))),
    *(
        (MIXTURE, tensor, pipeline, experts, experts, tensor)
        for tensor, pipeline, experts in product((1, 2), (1, 2), (1, 2, 4))
    ),
    *((MIXTURE, 2, 1, 2, experts, 1) for experts in (1, 2, 4)),
    (MIXTURE, 4, 2, 1, 2, 2),
    (MIXTURE, 4, 2, 2, 4, 1),
    *((MIXED, tensor, pipeline, 2, 2, tensor) for tensor, pipeline in product((1, 2, 4), (1, 2, 3))),
    (MIXED, 2, 3, 2, 4, 1),
    *((HYBRID, tensor, pipeline, 1, 1, tensor) for tensor, pipeline in product((1, 2, 4), (1, 2, 3))),
]


@pytest.mark.parametrize(("decoder", "tensor", "pipeline", "data", "experts", "expert_tensors"), DIVISIONS)
def test_ranks_together_hold_every_number_once(
    decoder: Decoder, tensor: int, pipeline: int, data: int, experts: int, expert_tensors: int
) -> None:
    layout, held = RankLayout(tensor=tensor, pipeline=pipeline, data=data), dict[str, np.ndarray]()
    for rank in range(layout.size):
        part, within = Part.of(rank, layout, experts, expert_tensors), rank % (tensor * data)
        for name, parameter in parameters(decoder, part).items():
            inside = np.zeros(parameter.shape[0], int)
            for piece in parameter.pieces:
                inside[piece.inside] += 1
                columns = piece.columns or (0, piece.shape[1] if len(piece.shape) > 1 else 0)
                assert parameter.shape[1:] == (
                    () if len(piece.shape) == 1 else (columns[1] - columns[0], *piece.shape[2:])
                )
                first = within < (experts * expert_tensors if parameter.expert else tensor)
                if not parameter.copy and first and (parameter.divided is not None or not within):
                    held.setdefault(piece.name, np.zeros(piece.shape, int))[piece.box] += 1
            assert inside.max(initial=0) <= 1
            assert name.endswith(("word_embeddings.weight", "output_layer.weight")) or inside.min() == 1
    assert len(held) == TENSORS[decoder]
    assert all((count == 1).all() for count in held.values())


@pytest.mark.parametrize("config", [GLM, DEEPSEEK, DEEPSEEK | {"q_lora_rank": None}, SMALL_MIXTURE])
@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({}, Part()),
        ({"tensor_parallel": 2}, Part(tensors=2, expert_tensors=2)),
        ({"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}, Part(tensors=2, experts=2)),
    ],
)
def test_memory_is_foretold_from_the_weights_that_a_rank_holds(config: dict, sizes: dict, part: Part) -> None:
    """All but norms and biases. A rank of one stage holds an embedding and, in these models, an output embedding."""
    config = {**UNSIZED, **config, "vocab_size": 130, "num_key_value_heads": 4}
    group = WorkerGroup("learner", backend="megatron", workers=math.prod(sizes.values()) or 1, **sizes)
    table = parameters(decoder_of(config, "here"), part).values()
    held = sum(math.prod(parameter.shape) for parameter in table if len(parameter.shape) > 1)
    assert divided(Model("made", config=config, alphabet="bytes"), group).weights == held


def test_uneven_stages_are_contiguous_and_differ_by_one_layer_at_most() -> None:
    for layers, stages in product(range(1, 81), range(1, 20)):
        made = stage_layers(layers, stages)
        assert len(made) == stages
        assert [layer for own in made for layer in own] == list(range(layers))
        assert max(map(len, made)) - min(map(len, made)) <= 1
        assert len(made[-1]) == min(map(len, made))
        assert len(made[0]) == min(map(len, made)) or sum(len(own) == min(map(len, made)) for own in made) == 1
    assert [len(own) for own in stage_layers(3, 2)] == [2, 1]
    assert [len(own) for own in stage_layers(5, 4)] == [1, 1, 2, 1]
    assert [len(own) for own in stage_layers(61, 16)] == [3, 3, *[4] * 13, 3]


def test_61_layers_on_16_ranks_are_each_held_once() -> None:
    decoder, layout = replace(DENSE, layers=DENSE.layers[:1] * 61), RankLayout(pipeline=16)
    held = Counter(
        piece.name
        for rank in range(16)
        for parameter in parameters(decoder, Part.of(rank, layout, 1, 1)).values()
        for piece in parameter.pieces
        if not parameter.copy and piece.name.endswith("o_proj.weight")
    )
    assert held == Counter(f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(61))


def test_queries_keys_and_values_are_interleaved_by_key_value_head() -> None:
    table = parameters(DENSE, Part(tensor=1, tensors=2))
    pieces = table["decoder.layers.0.self_attention.linear_qkv.weight"].pieces
    assert [(piece.name.split(".")[-2], piece.rows, piece.at) for piece in pieces] == [
        ("q_proj", (24, 36), 0),
        ("k_proj", (12, 18), 12),
        ("v_proj", (12, 18), 18),
        ("q_proj", (36, 48), 24),
        ("k_proj", (18, 24), 36),
        ("v_proj", (18, 24), 42),
    ]


def test_ranks_that_share_a_key_value_head_hold_equal_rows_of_it() -> None:
    """Megatron-core 0.16.1 replicates no weights: it gathers what the rows compute."""

    def rows(decoder: Decoder, rank: int, ranks: int) -> list[tuple[str, tuple[int, int], int]]:
        table = parameters(decoder, Part(tensor=rank, tensors=ranks))
        pieces = table["decoder.layers.0.self_attention.linear_qkv.weight"].pieces
        return [(piece.name.split(".")[-2][0], piece.rows, piece.at) for piece in pieces]

    assert [rows(DENSE, rank, 8) for rank in (2, 3)] == [
        [("q", (12, 24), 0)],
        [("k", (6, 12), 0), ("v", (6, 12), 6)],
    ]
    single = replace(DENSE, layers=(Layer(mixer=replace(GROUPED, heads=4, groups=1), mlp=None),))
    assert [rows(single, rank, 4) for rank in range(4)] == [
        [("q", (0, 9), 0)],
        [("q", (9, 18), 0)],
        [("q", (18, 24), 0), ("k", (0, 3), 6)],
        [("k", (3, 6), 0), ("v", (0, 6), 3)],
    ]


def test_layers_and_experts_count_from_the_first_of_the_rank() -> None:
    table = parameters(MIXTURE, Part(stage=1, stages=2, expert=1, experts=2))
    (piece,) = table["decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"].pieces
    assert piece.name == "model.layers.1.mlp.experts.3.down_proj.weight"


def test_the_output_embedding_is_a_copy_where_it_is_tied_and_on_another_rank() -> None:
    assert "output_layer.weight" not in parameters(DENSE, Part())
    assert parameters(DENSE, Part(stage=1, stages=2))["output_layer.weight"].copy
    assert not parameters(MIXTURE, Part(stage=1, stages=2))["output_layer.weight"].copy


def test_transformer_engine_keeps_norms_in_the_linear_layer_that_follows() -> None:
    dense, mixture = (parameters(decoder, Part(fused_norms=True)) for decoder in (DENSE, MIXTURE))
    (piece,) = dense["decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"].pieces
    assert piece.name == "model.layers.3.input_layernorm.weight"
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in dense
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in mixture


@pytest.mark.parametrize("division", [{}, {"expert": 1, "experts": 2}, {"expert_tensor": 1, "expert_tensors": 2}])
def test_grouped_experts_hold_what_single_ones_do(division: dict[str, int]) -> None:
    single, grouped = (parameters(MIXTURE, Part(**division, grouped_experts=each)) for each in (False, True))
    assert list(single.values()) == list(grouped.values())
    names = plain_names(MIXTURE, Part(**division, grouped_experts=True, fused_norms=True))
    assert list(names.values()) == list(single)
    experts = "decoder.layers.1.mlp.experts."
    assert names[f"{experts}linear_fc1.weight1"] == f"{experts}local_experts.1.linear_fc1.weight"
    assert names[f"{experts}linear_fc2.weight0"] == f"{experts}local_experts.0.linear_fc2.weight"


def test_a_config_of_either_age_gives_the_same_decoder() -> None:
    older = {name: value for name, value in QWEN3.items() if name != "rope_parameters"} | {"rope_theta": 1000000.0}
    decoder = decoder_of(QWEN3, "here")
    assert decoder == decoder_of(older, "here")
    assert decoder.mixers == [Grouped(heads=4, groups=2, head_dim=32, norm=True)]
    assert decoder.rope == Rope(base=1000000.0, dims=32) == decoder_of(QWEN3 | {"partial_rotary_factor": 0.5}, "").rope
    part = decoder_of({**UNSIZED, **GLM, "vocab_size": 9, "partial_rotary_factor": 0.25}, "here").rope
    assert part is not None and part.dims == GLM["head_dim"] / 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "mamba"}, "the model is a 'mamba'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type='yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "a quantization_config"),
        ({"model_type": "gpt_oss"}, "the model is a 'gpt_oss'; Megatron-core .* neither attention sinks nor sliding"),
        ({"model_type": "deepseek_v3"}, "fewer key-value heads than heads"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 4, "attention_bias": True}, "attention_bias=True"),
        (
            {**SMALL_MIXTURE, "num_experts_per_tok": 1, "norm_topk_prob": True},
            "num_experts_per_tok=1 with norm_topk_prob=True",
        ),
        ({"model_type": "glm4_moe", "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
    ],
)
def test_what_would_be_computed_differently_is_refused(change: dict, told: str) -> None:
    with pytest.raises(StageError, match=told) as caught:
        decoder_of(QWEN3 | change, "graph.py:7")
    assert caught.value.problems[0].where == "graph.py:7"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"workers": 4, "gpus": 2}, "has 2 GPUs for 4 workers"),
        ({"workers": 2, "fully_sharded": True}, "is fully_sharded"),
        ({"workers": 2, "context_parallel": 2}, "context_parallel=2 and no GPUs"),
        ({"gpus": 2, "context_parallel": 2}, "do not find the package 'transformer_engine'"),
    ],
)
def test_groups_that_cannot_train_are_refused_before_anything_starts(given: dict, told: str) -> None:
    found = [str(problem) for problem in problems(WorkerGroup("learner", backend="megatron", **given), "graph.py:3")]
    assert len(found) == 1
    assert found[0].startswith("graph.py:3: ")
    assert told in found[0]


def test_a_model_that_a_group_cannot_divide_is_refused_before_anything_starts() -> None:
    sizes = {"tensor_parallel": 3, "expert_parallel": 2, "expert_tensor_parallel": 1}
    group = WorkerGroup("learner", backend="megatron", workers=6, **sizes)
    heads, shared = fits(group, DEEPSEEK | {"num_key_value_heads": 4}, "graph.py:3")
    assert "tensor_parallel=3 does not divide the model's attention heads (4)" in str(heads)
    assert "tensor_parallel=3 does not divide the model's intermediate_size of shared experts (8)" in str(shared)


NEMOTRON = {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "mlp", "full_attention"],
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 128,
    "layer_norm_epsilon": 1e-5,
}


def test_layers_with_one_part_are_read_from_configs_of_all_ages() -> None:
    older = {name: value for name, value in NEMOTRON.items() if name != "layers_block_type"}
    decoder = decoder_of(NEMOTRON, "here")
    assert decoder == decoder_of(older | {"hybrid_override_pattern": "M-*"}, "here")
    assert decoder == decoder_of(older | {"layer_types": ["mamba", "mlp", "attention"]}, "here")
    assert decoder.layers == (
        Layer(mixer=StateSpace(heads=8, head_dim=16, groups=2, state=16, kernel=4), mlp=None),
        Layer(mixer=None, mlp=Dense(inner=96, gated=False)),
        Layer(mixer=Grouped(heads=4, groups=2, head_dim=32), mlp=None),
    )
    assert decoder.rope is None and decoder == decoder_of(NEMOTRON | {"tie_word_embeddings": True}, "here")
    names = {piece.name for parameter in parameters(decoder, Part()).values() for piece in parameter.pieces}
    assert {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"} <= names
    assert {"backbone.layers.0.norm.weight", "backbone.layers.2.mixer.q_proj.weight"} <= names
    assert "backbone.layers.1.mixer.up_proj.weight" in names and not any("gate_proj" in name for name in names)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers_block_type": ["mamba", "mlp"]}, "no layer with attention"),
        ({"hybrid_override_pattern": "", "layers_block_type": None}, "no layer with attention"),
        ({"layers_block_type": ["moe", "attention"], "n_shared_experts": 2}, "n_shared_experts other than 1"),
        ({"layers_block_type": ["sliding", "attention"]}, r"layers of the kind \['sliding'\]"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ({"use_bias": True, "mlp_bias": True}, "mlp_bias, use_bias"),
        ({"sliding_window": 128}, "a sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "a quantization_config"),
    ],
)
def test_hybrids_that_would_be_computed_differently_are_refused(change: dict, told: str) -> None:
    with pytest.raises(StageError, match=told):
        decoder_of(NEMOTRON | change, "graph.py:7")


EXPERTS = {
    "layers_block_type": ["mamba", "moe", "full_attention", "mlp"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}


def test_experts_of_a_hybrid_have_no_gates_and_a_shared_expert_of_its_own_size() -> None:
    (mixture,) = (layer.mlp for layer in decoder_of(NEMOTRON | EXPERTS, "here").layers if isinstance(layer.mlp, Sparse))
    assert mixture == Sparse(experts=4, chosen=2, inner=8, gated=False, sigmoid=True, scale=2.5, shared=24)


@pytest.mark.parametrize("change", [{}, EXPERTS, {"tie_word_embeddings": True}])
def test_memory_of_a_hybrid_is_foretold_from_the_weights_that_a_rank_holds(change: dict) -> None:
    config = NEMOTRON | change
    group = WorkerGroup("learner", backend="megatron", workers=2, tensor_parallel=2)
    table = parameters(decoder_of(config, "here"), Part(tensors=2, expert_tensors=2)).values()
    held = sum(math.prod(parameter.shape) for parameter in table if len(parameter.shape) > 1)
    assert divided(Model("made", config=config, alphabet="bytes"), group).weights == held


def test_groups_of_mamba_heads_stay_whole_and_samples_too() -> None:
    sizes = {"tensor_parallel": 4, "context_parallel": 2}
    group = WorkerGroup("learner", backend="megatron", gpus=8, **sizes)
    (groups, context) = fits(group, NEMOTRON, "graph.py:3")
    assert "tensor_parallel=4 does not divide the model's groups of Mamba heads (2)" in str(groups)
    assert "context_parallel=2, and the model has Mamba layers" in str(context)


def test_groups_that_can_train_are_not() -> None:
    group = WorkerGroup("learner", backend="megatron", workers=8, gpus=8, tensor_parallel=2, pipeline_parallel=2)
    assert not list(problems(group, "graph.py:3"))


def test_samples_are_sliced_where_transformer_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "is_installed", lambda package: package == "transformer_engine")
    group = WorkerGroup("learner", backend="megatron", gpus=4, tensor_parallel=2, context_parallel=2)
    assert not list(problems(group, "graph.py:3"))


def test_the_checks_and_the_tables_load_no_tensor_library() -> None:
    import subprocess

    code = (
        "import sys; import stages.backends.megatron.limits, stages.backends.megatron.names;"
        "assert not {'torch', 'megatron', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
