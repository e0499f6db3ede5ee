"""The quadratic cost of a model's attention: known from a config or a folder, 0.0 otherwise, and part of the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.shapes import SHAPES
from graphs import grpo, quickstart
from ops.flops import Transformer, model_flops, quadratic_cost
from pipeline import Backend, Model, WorkerGroup
from pipeline.plan.planner import plan
from stages import Dynamic, Packed, PrevLogprobs, RefLogprobs, Train
from stages.model_shape import attention_cost, launched_tokens, positions, shape_faults
from tests.unit.test_folder import DEEPSEEK, GLM, MIXTURE
from tests.unit.test_torch_families import EXPERTS, GPT_OSS, NEMOTRON

CONFIG = {  # Qwen3-0.6B
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
COST = quadratic_cost(Transformer.of(CONFIG))
MODEL = Model("qwen", config=CONFIG, alphabet="bytes")


def test_the_cost_is_that_of_the_operations() -> None:
    shape = Transformer.of(CONFIG)
    one, two = (model_flops(shape, [n], training=True) for n in (1000, 30_000))
    assert two / one == pytest.approx((30_000 + COST * 30_000**2) / (1000 + COST * 1000**2), rel=1e-3)
    assert pytest.approx(1e-4, rel=0.1) == COST


@pytest.mark.parametrize(
    ("changed", "most"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": "4096"}, None),
        ({"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 4096}, 512),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 4}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            32768,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, 64),
        ({"max_position_embeddings": 64, "text_config": [1, 2]}, 64),
    ],
)
def test_the_most_tokens_of_a_sample_are_those_of_the_config(changed: dict[str, Any], most: int | None) -> None:
    assert positions(CONFIG | changed) == most


@pytest.mark.parametrize(
    ("config", "what", "why"),
    [
        (MIXTURE | {"num_experts_per_tok": 5}, "num_experts_per_tok=5", "it must be at most num_experts=4"),
        (GLM | {"num_experts_per_tok": 5}, "num_experts_per_tok=5", "it must be at most n_routed_experts=4"),
        (GPT_OSS | {"num_experts_per_tok": 5}, "num_experts_per_tok=5", "it must be at most num_local_experts=4"),
        (GLM | {"n_group": 3}, "n_group=3", "it must be a divisor of n_routed_experts=4"),
        (DEEPSEEK | {"n_group": 4}, "n_group=4", "it must be at most half of n_routed_experts=4"),
        (DEEPSEEK | {"topk_group": 3}, "topk_group=3", "it must be at most n_group=2"),
        (DEEPSEEK | {"head_dim": 8}, "head_dim=8", "it must be equal to qk_rope_head_dim=4"),
        (DEEPSEEK | {"kv_lora_rank": 0}, "kv_lora_rank=0", "it must be a whole number, 1 or more"),
        (DEEPSEEK | {"q_lora_rank": 0}, "q_lora_rank=0", "it must be a whole number, 1 or more"),
        (EXPERTS | {"moe_latent_size": -4}, "moe_latent_size=-4", "it must be a whole number, 1 or more"),
        (NEMOTRON | {"n_groups": 3}, "n_groups=3", "it must be a divisor of mamba_num_heads=4"),
        (NEMOTRON | {"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads=3", "a multiple of"),
        (DEEPSEEK | {"v_head_dim": None}, "v_head_dim=None", "it must be a whole number, 1 or more"),
        (DEEPSEEK | {"qk_nope_head_dim": -1}, "qk_nope_head_dim=-1", "it must be a whole number, 1 or more"),
        (NEMOTRON | {"ssm_state_size": 0}, "ssm_state_size=0", "it must be a whole number, 1 or more"),
        (NEMOTRON | {"chunk_size": 0}, "chunk_size=0", "it must be a whole number, 1 or more"),
        (GLM | {"moe_intermediate_size": "24"}, "moe_intermediate_size='24'", "it must be a whole number, 1 or more"),
        (GLM | {"first_k_dense_replace": "1"}, "first_k_dense_replace='1'", "it must be a whole number, 0 or more"),
        (MIXTURE | {"decoder_sparse_step": 0}, "decoder_sparse_step=0", "it must be a whole number, 1 or more"),
        (NEMOTRON | {"num_key_value_heads": None}, "num_key_value_heads=None", "it must be a whole number, 1 or more"),
        (GLM | {"n_shared_experts": None}, "n_shared_experts=None", "it must be a whole number, 0 or more"),
        (DEEPSEEK | {"n_shared_experts": -1}, "n_shared_experts=-1", "it must be a whole number, 0 or more"),
        (EXPERTS | {"n_shared_experts": None}, "n_shared_experts=None", "it must be a whole number, 0 or more"),
        (GLM | {"routed_scaling_factor": 1}, "routed_scaling_factor=1", "a number with a point"),
        (CONFIG | {"head_dim": 7}, "head_dim=7", "turns pairs"),
        (CONFIG | {"model_type": "llama", "head_dim": None, "hidden_size": 48}, "head_dim=3", "turns pairs"),
        (GPT_OSS | {"head_dim": 7}, "head_dim=7", "turns pairs"),
        (DEEPSEEK | {"qk_rope_head_dim": 5}, "head_dim=5", "turns pairs"),
        (
            CONFIG | {"layer_types": ["full_attention", "sliding_attention"] * 14, "use_sliding_window": False},
            "use_sliding_window=False",
            "layer_types has 'sliding_attention'",
        ),
        (
            CONFIG | {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "llama3", "factor": 8.0}},
            "partial_rotary_factor=0.5 with rope_type='llama3'",
            "transformers turns whole heads of a 'qwen3'",
        ),
    ],
)
def test_what_contradicts_itself_is_told_once(config: dict[str, Any], what: str, why: str) -> None:
    ((said, because),) = shape_faults(config)
    assert said == what and why in because


@pytest.mark.parametrize("config", [GLM, DEEPSEEK, GPT_OSS, NEMOTRON, EXPERTS])
def test_numbers_that_are_left_out_or_null_are_not_wrong(config: dict[str, Any]) -> None:
    nothing = {"q_lora_rank": None, "moe_latent_size": None}
    nothing |= {"head_dim": None} if config["model_type"] != "nemotron_h" else {}
    assert not shape_faults(config) and not shape_faults(config | nothing)
    assert not any(shape_faults({key: config[key] for key in config if key != left}) for left in config)


@pytest.mark.parametrize(
    "config",
    [
        GLM | {"n_shared_experts": 0},
        GLM | {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 8.0}},
        EXPERTS | {"routed_scaling_factor": 1},
        NEMOTRON | {"head_dim": 7},
        CONFIG | {"partial_rotary_factor": 0.5},
        CONFIG | {"layer_types": ["sliding_attention"] * 28, "use_sliding_window": True},
    ],
)
def test_what_transformers_takes_is_not_wrong(config: dict[str, Any]) -> None:
    assert not shape_faults(config)


def folder(tmp_path: Path, text: str) -> Model:
    (tmp_path / "config.json").write_text(text)
    return Model(str(tmp_path))


def test_it_is_known_from_a_config_or_a_local_folder(tmp_path: Path) -> None:
    assert attention_cost(MODEL) == COST == attention_cost(MODEL.frozen())
    assert attention_cost(folder(tmp_path, json.dumps(CONFIG))) == COST


def test_without_a_vocabulary_the_alphabet_counts() -> None:
    bare = {name: value for name, value in CONFIG.items() if name != "vocab_size"}
    for alphabet, size in (("0123456789", 12), ("bytes", 258)):
        expected = quadratic_cost(Transformer.of(bare | {"vocab_size": size}))
        assert attention_cost(Model("made", config=bare, alphabet=alphabet)) == expected


@pytest.mark.parametrize(
    "text", ["", "[]", "[1]", "{}", '{"hidden_size": "x"}', json.dumps(CONFIG | {"num_experts": 8})]
)
def test_it_is_zero_for_an_unknown_shape(tmp_path: Path, text: str) -> None:
    assert attention_cost(folder(tmp_path, text)) == 0.0


@pytest.mark.parametrize("source", ["Qwen/Qwen3-0.6B", "/nowhere/at/all", "", 3, None])
def test_it_is_zero_for_a_model_that_is_not_here(source: Any) -> None:
    assert attention_cost(Model(source)) == 0.0


def learner(backend: Any) -> WorkerGroup:
    return WorkerGroup("learner", backend=backend)


@pytest.mark.parametrize(
    ("backend", "microbatch", "expected"),
    [
        ("torch", Dynamic(8192), COST),
        ("megatron", Dynamic(8192), COST),
        ("megatron", Packed(8192), COST),
        ("torch", Packed(8192), 0.0),  # it computes the whole row
        (Backend(name="mine"), Packed(8192), COST),
        (Backend(name="mine", separates=False), Packed(8192), 0.0),
        ("megatron", 8, 0.0),
    ],
    ids=str,
)
def test_stages_divide_their_batch_by_it(backend: Any, microbatch: Any, expected: float) -> None:
    on = learner(backend)
    for stage in (
        Train(MODEL, on=on, lr=1e-3, microbatch=microbatch),
        PrevLogprobs(MODEL, on=on, microbatch=microbatch),
        RefLogprobs(MODEL.frozen(), on=on, microbatch=microbatch),
    ):
        assert stage.sharding.quadratic == expected


@pytest.mark.parametrize(
    ("group", "microbatch", "expected"),
    [
        (learner("megatron"), Packed(8192), True),
        (learner("megatron"), Packed(8192, shared=False), False),
        (learner("megatron"), Dynamic(8192), False),
        (learner("torch"), Packed(8192), False),
        (learner(Backend(name="mine")), Packed(8192), False),
        (learner(Backend(name="mine", shares=True)), Packed(8192), True),
        (WorkerGroup("learner", backend="megatron", gpus=2, context_parallel=2), Packed(8192), False),
    ],
)
def test_packed_rows_share_prompts_where_the_workers_can(group: WorkerGroup, microbatch: Any, expected: bool) -> None:
    train = Train(MODEL, on=group, lr=1e-3, microbatch=microbatch)
    assert train.sharding.shares == PrevLogprobs(MODEL, on=group, microbatch=microbatch).sharding.shares == expected
    assert train.sharding.floor == (launched_tokens(MODEL) if expected and group.gpus else 0.0)


def test_a_launch_lasts_as_long_as_fewer_tokens_of_a_larger_model() -> None:
    small, large = (launched_tokens(Model("m", config=SHAPES[name], alphabet="bytes")) for name in ("0.6B", "4B"))
    assert small == pytest.approx(14_650, rel=0.01) and large == pytest.approx(2_280, rel=0.01)
    assert launched_tokens(Model("nowhere")) == 0.0


def test_it_is_a_number_of_the_plan() -> None:
    made = quickstart.graph()
    assert plan(made)[0].stage("train").sharding.quadratic == 0.0
    stages = [replace(s, microbatch=Dynamic(512)) if isinstance(s, Train) else s for s in made.stages]
    found = plan(replace(made, stages=stages))[0].stage("train").sharding
    model = next(stage.model for stage in stages if isinstance(stage, Train))
    assert found.quadratic == attention_cost(model) > 0


def test_the_default_of_grpo_counts_tokens() -> None:
    by_kind = {type(stage): stage for stage in grpo.graph(microbatch=4096).stages}
    for kind in (Train, PrevLogprobs, RefLogprobs):
        assert by_kind[kind].microbatch == Dynamic(4096)
    assert by_kind[PrevLogprobs].run_samples == by_kind[RefLogprobs].run_samples == 32


@pytest.mark.parametrize("colocated", [True, False])
def test_on_megatron_grpo_packs_rows_and_scores_with_the_frozen_weights_once(colocated: bool) -> None:
    gpus: dict[str, Any] = {"generator": "vllm", "trainer": "megatron", "sampler_gpus": 1, "learner_gpus": 1}
    by_kind = {type(stage): stage for stage in grpo.graph(**gpus, colocated=colocated, microbatch=4096).stages}
    for kind in (Train, RefLogprobs):
        assert by_kind[kind].microbatch == Packed(4096)
    assert by_kind[RefLogprobs].run_samples is None, "the whole batch: the weights change places once"
    assert by_kind[Train].prev == ("own" if colocated else "field")
    assert (PrevLogprobs in by_kind) != colocated
    assert colocated or (by_kind[PrevLogprobs].microbatch, by_kind[PrevLogprobs].run_samples) == (Packed(4096), 32)


def test_it_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = f"""
import sys
from pipeline import Model
from stages.model_shape import attention_cost
assert attention_cost(Model({str(tmp_path)!r})) > 0
assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
