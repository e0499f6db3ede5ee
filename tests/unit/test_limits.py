"""Whether a backend's ranks can divide a model, from what is known of its config before it is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from graphs.quickstart import TINY_QWEN3
from pipeline import Model, WorkerGroup
from stages.backends.megatron import limits as megatron
from stages.backends.vllm import limits as vllm


def found(backend: Any, config: dict[str, Any], **sizes: int) -> list[str]:
    return [problem.what for problem in backend.fits(WorkerGroup("group", **sizes), config, "graph.py:1")]


@pytest.mark.parametrize(
    ("heads", "groups", "tensor", "says"),
    [
        (12, 12, 4, ""), (12, 3, 6, ""), (12, 4, 4, ""), (12, 6, 4, "6 key-value heads"),
        (12, 12, 5, "attention heads"), (None, None, 3, ""), ("12", "x", 5, ""), (12, None, 4, ""),
    ],
)  # fmt: skip
def test_heads_that_vllm_divides(heads: Any, groups: Any, tensor: int, says: str) -> None:
    config = {"num_attention_heads": heads, "num_key_value_heads": groups}
    told = found(vllm, config, workers=tensor, tensor_parallel=tensor)
    assert len(told) == bool(says) and says in "".join(told)


@pytest.mark.parametrize(
    ("change", "sizes", "says"),
    [
        ({}, {}, ""),
        ({}, {"workers": 4, "tensor_parallel": 4}, ""),  # the only group is copied
        ({}, {"workers": 16, "tensor_parallel": 16}, "Mamba heads (8)"),
        ({"n_groups": 2}, {"workers": 4, "gpus": 4, "tensor_parallel": 4}, "groups of Mamba heads (2)"),
        ({"n_groups": 2}, {"gpus": 1}, ""),
        ({"n_groups": 2}, {}, "n_groups=2"),
        ({"n_groups": 2}, {"workers": 2, "tensor_parallel": 2}, ""),  # each rank has one
        ({"n_groups": 4}, {"workers": 2, "tensor_parallel": 2}, "n_groups=4"),
        ({"layers_block_type": ["mamba", "attention", "moe"]}, {}, "experts without gates"),
        ({"layers_block_type": ["mamba", "attention", "moe"]}, {"gpus": 1}, ""),
        ({"layers_block_type": None}, {}, ""),
    ],
)
def test_hybrids_that_vllm_computes(change: dict[str, Any], sizes: dict[str, int], says: str) -> None:
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "", "layers_block_type": ["mamba", "attention"],
              "mamba_num_heads": 8, "n_groups": 1}  # fmt: skip
    told = found(vllm, config | change, **sizes)
    assert len(told) == bool(says) and says in "".join(told)


@pytest.mark.parametrize(
    ("family", "says"),
    [("qwen3", ""), ("qwen3_moe", ""), ("deepseek_v3", "weights='fp8'"), ("nemotron_h", "weights='fp8'"), (None, "")],
)
def test_families_whose_weights_are_quantized(family: str | None, says: str) -> None:
    group = WorkerGroup("group", gpus=1, weights="fp8")
    told = [problem.what for problem in vllm.fits(group, {"model_type": family} if family else {}, "graph.py:1")]
    assert len(told) == bool(says) and says in "".join(told)


def test_a_folder_of_quantized_weights_is_not_served() -> None:
    (problem,) = vllm.fits(
        WorkerGroup("group"), {"model_type": "qwen3", "quantization_config": {"bits": 4}}, "graph.py:1"
    )
    assert "quantization_config" in problem.what and "bfloat16" in problem.fix


WHOLE_BLOCKS = {
    "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0],
    "moe_intermediate_size": 256, "intermediate_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "tensor", "says"),
    [
        ({}, 1, ""),
        ({}, 2, ""),
        ({"num_key_value_heads": 1}, 1, "64 rows of k_proj"),
        ({"num_attention_heads": 5}, 1, "320 rows of q_proj"),
        ({"moe_intermediate_size": 192}, 1, "192 rows of gate_proj (moe_intermediate_size)"),
        ({"intermediate_size": 200}, 1, "200 rows of gate_proj (intermediate_size)"),
        ({"intermediate_size": 200, "mlp_only_layers": []}, 1, ""),  # no layer has that size
        ({"intermediate_size": 256 + 128}, 2, "192 rows of gate_proj (intermediate_size)"),
        ({"intermediate_size": 511}, 2, "intermediate_size (511)"),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 512}, 2, ""),
        ({"model_type": "qwen3", "num_experts": None, "num_key_value_heads": 1}, 1, "64 rows of k_proj"),
    ],
)
def test_blocks_that_a_rank_would_cut(change: dict[str, Any], tensor: int, says: str) -> None:
    group = WorkerGroup("group", workers=tensor, gpus=tensor, tensor_parallel=tensor, weights="fp8")
    told = [problem.what for problem in vllm.fits(group, WHOLE_BLOCKS | change, "graph.py:1")]
    assert bool(told) == bool(says) and says in "".join(told)


@pytest.mark.parametrize(
    ("version", "family", "gpus", "says"),
    [
        ("0.31.2", "gpt_oss", 1, "vLLM 0.31 is"), ("0.31.2", "gpt_oss", 0, "vLLM 0.31 is"),
        ("0.32.0", "gpt_oss", 0, ""), ("0.26.0", "qwen3", 0, ""), ("", "gpt_oss", 0, ""),
        ("0.27.0", "nemotron_h", 0, "vLLM 0.27 is"), ("0.26.0", "nemotron_h", 1, ""), ("0.32.0", "nemotron_h", 0, ""),
    ],
)  # fmt: skip
def test_a_family_may_need_a_newer_vllm(
    monkeypatch: pytest.MonkeyPatch, version: str, family: str, gpus: int, says: str
) -> None:
    monkeypatch.setattr(vllm, "_installed", lambda: version)
    told = found(vllm, {"model_type": family}, gpus=gpus)
    assert len(told) == bool(says) and says in "".join(told)


@pytest.mark.parametrize(
    ("family", "config", "says"),
    [
        ("glm4_moe", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("deepseek_v3", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("gpt_oss", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("gpt_oss", {"tie_word_embeddings": False}, ""),
        ("qwen3", {"tie_word_embeddings": True}, ""),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"attention_bias": True}, ""),
        ("glm4_moe", {"attention_bias": True}, ""),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 1.0}}, ""),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("glm4_moe", {"partial_rotary_factor": 0.5}, ""),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"rope_interleave": True}, ""),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ("nemotron_h", {"mlp_hidden_act": "relu2"}, ""),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3", {"hidden_act": "silu"}, ""),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0"),
        ("deepseek_v3", {"n_shared_experts": 1}, ""),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding windows in some layers"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, ""),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 1}, ""),
        (
            "qwen2",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding windows in some layers",
        ),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, ""),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "max_window_layers": 2}, ""),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, ""),
        ("nemotron_h", {"layers_block_type": ["attention", "mlp"]}, "no Mamba layer"),
    ],
)
def test_settings_that_vllm_computes_differently(family: str, config: dict[str, Any], says: str) -> None:
    config = {"model_type": family, "num_hidden_layers": 2, "layers_block_type": ["mamba"], **config}
    told = found(vllm, config, gpus=1)
    assert len(told) == bool(says) and says in "".join(told)
    drafts = WorkerGroup("group", gpus=1, draft=Model("draft", config=config, alphabet="bytes"))
    assert [problem.what for problem in vllm.fits(drafts, {}, "graph.py:1")] == told


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "intermediate_size", "rope_theta"])
@pytest.mark.parametrize("value", ["4", None, [], 0, -1, {}])
def test_a_config_that_makes_no_sense_is_left_to_the_model(name: str, value: Any) -> None:
    for config in (TINY_QWEN3 | {name: value}, {key: TINY_QWEN3[key] for key in TINY_QWEN3 if key != name}):
        for backend in (megatron, vllm):
            told = found(backend, config, workers=8, tensor_parallel=2, pipeline_parallel=2)
            assert all("_parallel=2" in what for what in told), "of the sizes, and of nothing else"


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("qwen3", ""),
        ("nemotron_h", ""),
        ("gpt_oss", ""),
        ("deepseek_v3", "is a 'deepseek_v3'"),
        ("mamba2", "'mamba2'"),
        (None, ""),
    ],
)
def test_families_whose_cache_has_scales(family: str | None, says: str) -> None:
    config = {"model_type": family} if family else {}
    config |= {"kv_lora_rank": 512} if family == "deepseek_v3" else {}
    for cache in ("auto", "fp8"):
        group = WorkerGroup("group", gpus=1, cache=cache)
        told = list(vllm.fits(group, config, "graph.py:1"))
        assert len(told) == bool(says and cache == "fp8") and all(says in problem.what for problem in told)
        assert all(("latents" in problem.why) == (family == "deepseek_v3") for problem in told)
