"""Families of models on the torch backend: scores, packed rows, updates, and what keeps its precision."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from pipeline import Model, StageError
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Packed, Plain, Sharding
from stages import ClippedLoss, LoRA
from stages.backends import Batch, Draws, Optimization, Sampling, one_shard
from stages.backends.model.adapters import attach
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.places import placed
from stages.backends.model.weights import weights
from stages.backends.torch.engine import TorchEngine
from stages.backends.torch.optimize import TorchLearner
from stages.backends.torch.rows import APART, apart
from stages.backends.torch.score import score
from stages.images import FAMILIES as SEEING
from stages.model_shape import shape_faults
from tests.unit.test_folder import DEEPSEEK, GLM
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
GPT_OSS = QWEN3 | {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,  # shorter than the samples
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
NEMOTRON = {
    "model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "hidden_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "ssm_state_size": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 4, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
    "initializer_range": 0.3,
    "time_step_min": 1e-9,  # transformers has no shorter time steps where it scores, and has them where it samples
}  # fmt: skip
EXPERTS = NEMOTRON | {
    "layers_block_type": ["mamba", "moe", "attention"], "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 12, "n_shared_experts": 1, "topk_group": 1,
    "moe_latent_size": 8,
}  # fmt: skip
FAMILIES = {
    "llama": QWEN3 | {"model_type": "llama"},
    "qwen2": QWEN3 | {"model_type": "qwen2"},
    "glm4_moe": GLM,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "nemotron_h": NEMOTRON,
    "nemotron_h, experts": {name: size for name, size in EXPERTS.items() if name != "moe_latent_size"},
    "nemotron_h, latent": EXPERTS,
}
_SPARSE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_WINDOW = {"sliding_window": 4}  # shorter than the samples
_OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "cohere2": _WINDOW,
    "deepseek_v2": {name: size for name, size in DEEPSEEK.items() if name != "rope_parameters"},
    "exaone4": _WINDOW,
    "gemma": {},
    "gemma2": _WINDOW,
    "gemma3_text": _WINDOW,
    "glm4": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "gpt_neox": {},
    "granite": {},
    "granitemoe": _SPARSE,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "llama4_text": _SPARSE | {"attention_chunk_size": 4, "intermediate_size_mlp": 48, "num_experts_per_tok": 1},
    "mistral": _WINDOW,
    "mixtral": _SPARSE,
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": _SPARSE,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen2_moe": _SPARSE,
    "qwen3": {},
    "qwen3_moe": _SPARSE,
    "smollm3": {},
}
OTHERS = {family: QWEN3 | change | {"model_type": family} for family, change in _OTHERS.items()}
MIXED = {"nemotron_h", "bloom", "lfm2", "llama4_text", "opt"}
PROMPTS = Ragged(torch.arange(2, 12), (2, 5, 3))
RESPONSES = Ragged(torch.arange(9, 0, -1) % 7 + 2, (4, 1, 4))


def network(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model = Model(family, config=(FAMILIES | OTHERS)[family], alphabet="0123456789")
    made = load_network(model, load_tokenizer(model), dtype=dtype, device=torch.device("cpu"))
    for name, constant in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            constant.copy_(torch.linspace(-0.3, 0.3, len(constant)))
    return made


@pytest.mark.parametrize("family", FAMILIES | OTHERS)
def test_scores_are_those_of_samples_alone_in_rectangles_and_in_packed_rows(family: str) -> None:
    made, wanted = network(family), []
    assert apart(made) != (family.split(",")[0] in MIXED)
    with torch.no_grad():
        for prompt, response in zip(PROMPTS.rows(), RESPONSES.rows()):
            logits = made(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            wanted.append(logits.log_softmax(-1).gather(-1, response[:, None])[:, 0])
    for cut in (Plain(), Packed(16)):
        shard = one_shard(PROMPTS, RESPONSES, Sharding.of(cut))
        scored = score(made, PROMPTS, RESPONSES, shard, temperature=1.0, pad=0)
        torch.testing.assert_close(scored.values, torch.cat(wanted), atol=1e-5, rtol=0)


def test_every_family_whose_rows_are_packed_is_tested() -> None:
    """Those of models that see images: in test_images.py."""
    tested = {family.split(",")[0] for family in FAMILIES | OTHERS}
    assert (tested - MIXED) | {*SEEING} == APART


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_changes_all_weights_and_no_constant(family: str) -> None:
    made, old = network(family), Ragged(torch.full((9,), -2.3), RESPONSES.lengths)
    before = weights(made)
    learner = TorchLearner(made, Optimization(lr=1e-2, weight_decay=0.1), pad=0)
    batch = Batch(PROMPTS, RESPONSES, torch.tensor([1.0, -1.0, 0.5]), old, old, old)
    (update,) = one_shard(PROMPTS, RESPONSES, Sharding.of(Packed(16))).updates
    learner.update(batch, ClippedLoss(), temperature=1.0, update=update, packed=True)
    same = [name for name, tensor in weights(made).items() if torch.equal(tensor, before[name])]
    assert same == [name for name in before if name.endswith("e_score_correction_bias")]
    assert any(same) == (family in ("glm4_moe", "deepseek_v3", "nemotron_h, experts", "nemotron_h, latent"))


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_logprobs_of_scores(family: str) -> None:
    """Prompts have several lengths, so that those of a batch are padded."""
    engine, model = (
        TorchEngine(torch.device("cpu"), torch.float32),
        Model(family, config=FAMILIES[family], alphabet="0123456789"),
    )
    prompts = engine.encode(model, ["1", "0123456", "98765"] * 2)
    made = engine.generate(model, prompts, Sampling(7), Draws(0, (0,) * 6, tuple(range(6))))
    shard = one_shard(prompts, made.response_ids, Sharding.of(Plain(2)))
    scored = engine.score(model, prompts, made.response_ids, shard, temperature=1.0)
    torch.testing.assert_close(scored.values, made.logprobs.values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_the_bias_of_experts_keeps_float32_when_weights_are_halved(family: str) -> None:
    made = network(family, torch.bfloat16)
    tensors, _, held = placed(made, torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {each.dtype for each in tensors.values()} == {"bfloat16", "float32"}
    assert tensors[name].dtype == "float32" and held[name].dtype == weights(made, torch.bfloat16)[name].dtype
    assert held[name].tolist() == torch.linspace(-0.3, 0.3, 4).tolist()
    assert all(tensor.dtype == torch.bfloat16 for other, tensor in held.items() if other != name)


@pytest.mark.parametrize(
    ("family", "change", "runs"),
    [
        ("glm4_moe", {"num_experts_per_tok": 4}, True),
        ("glm4_moe", {"num_experts_per_tok": 5}, False),
        ("gpt_oss", {"num_experts_per_tok": 5}, False),
        ("glm4_moe", {"n_group": 3}, False),
        ("deepseek_v3", {"n_group": 4}, False),  # of one expert each
        ("deepseek_v3", {"topk_group": 2}, True),
        ("deepseek_v3", {"topk_group": 3}, False),
        ("deepseek_v3", {"head_dim": 4}, True),
        ("deepseek_v3", {"head_dim": 8}, False),  # transformers rotates that many
        ("deepseek_v3", {"q_lora_rank": None}, True),
        ("nemotron_h", {"n_groups": 4}, True),
        ("nemotron_h", {"n_groups": 3}, False),
    ],
)
def test_a_check_refuses_what_transformers_does_not_compute(family: str, change: dict[str, Any], runs: bool) -> None:
    config = FAMILIES[family] | change
    assert bool(shape_faults(config)) != runs
    model = Model(family, config=config, alphabet="0123456789")
    made = load_network(model, load_tokenizer(model), dtype=torch.float32, device=torch.device("cpu"))
    with contextlib.nullcontext() if runs else pytest.raises(RuntimeError):
        made(torch.arange(2, 8)[None])


ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
ADAPTED = {
    "glm4_moe": ATTENTION | MLP,
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"} | MLP,
    "gpt_oss": ATTENTION,
    "nemotron_h": ATTENTION | {"in_proj", "out_proj", "up_proj", "down_proj"},
    "nemotron_h, latent": ATTENTION | {"in_proj", "out_proj", "up_proj", "down_proj"},
}


@pytest.mark.parametrize("family", ADAPTED)
def test_an_adapter_has_all_linear_layers_but_experts_and_those_that_vllm_transforms(family: str) -> None:
    made = network(family)
    attach(made, LoRA(rank=2), seed=0, where="here")
    adapted = list(weights(made))
    assert {name.split(".")[-3] for name in adapted} == ADAPTED[family]
    assert not [name for name in adapted if ".experts." in name]
    assert any(".shared_experts." in name for name in adapted) == (family not in ("gpt_oss", "nemotron_h"))


@pytest.mark.parametrize(
    ("family", "target", "why"),
    [
        ("gpt_oss", "down_proj", "experts are computed together"),
        ("gpt_oss", "router", "routers stay as they are"),
        ("glm4_moe", "gate", "routers stay as they are"),
        ("deepseek_v3", "gate", "routers stay as they are"),
        ("deepseek_v3", "kv_b_proj", "vLLM multiplies it"),
        ("deepseek_v3", "q_proj", "no layer of the model has that name"),
        ("nemotron_h", "conv1d", "a convolution is no linear layer"),
        ("nemotron_h", "fc1_latent_proj", "no layer of the model has that name"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_refused_with_the_reason(family: str, target: str, why: str) -> None:
    with pytest.raises(StageError, match=why):
        attach(network(family), LoRA(targets=(target,)), seed=0, where="here")


def test_an_adapter_of_nemotron_h_is_that_of_merged_weights() -> None:
    """Logits with adapters are those of the model whose weights are W + (alpha / rank) B A, of each layer that can have
    one: attention, Mamba, feed-forward, shared experts, and the projections around experts."""
    named = LoRA(rank=2, alpha=3, targets=(*LoRA().names("nemotron_h"), "fc1_latent_proj", "fc2_latent_proj"))
    for family, lora in (("nemotron_h", LoRA(rank=2, alpha=3)), ("nemotron_h, latent", named)):
        merged, adapted = network(family), network(family)
        attach(adapted, lora, seed=0, where="here")
        random, changed = torch.Generator().manual_seed(0), 0
        for name, layer in adapted.named_modules():
            if hasattr(layer, "lora_B"):
                layer.lora_B.weight.data.copy_(torch.randn(layer.lora_B.weight.shape, generator=random))
                added = lora.scaling * layer.lora_B.weight.detach() @ layer.lora_A.weight.detach()
                merged.get_submodule(name).weight.data.add_(added)
                changed += 1
        ids = torch.arange(2, 12)[None]
        with torch.no_grad():
            made, wanted, before = (each(ids).logits for each in (adapted, merged, network(family)))
        assert changed == (2 + 2 + 4 + 2 if family == "nemotron_h" else 2 + 2 + 2 + 4)
        torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-5)
        assert float((made - before).abs().max()) > 1e-2
