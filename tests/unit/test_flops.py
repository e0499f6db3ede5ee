"""FLOP formulas against torch's count of a running model, and the table of peaks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ops.flops import Transformer, model_flops, peak_tflops, quadratic_cost

torch.set_num_threads(1)

CONFIG = Qwen3Config(
    num_hidden_layers=3,
    hidden_size=96,
    intermediate_size=160,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=300,
    tie_word_embeddings=False,
    attn_implementation="eager",
)
SHAPE = Transformer.of(CONFIG.to_dict())
SAME = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def counted(length, kept, training, model=None):
    """Return torch's FLOPs of one sequence with logits at its last `kept` positions. It also counts products only,
    here without those of angles: transformers 5.16 multiplies positions and frequencies as matrices."""
    model = model or Qwen3ForCausalLM(CONFIG)
    ids = torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        logits = model(ids, use_cache=False, logits_to_keep=kept).logits
        if training:
            logits.sum().backward()
    assert logits.shape[1] == kept
    angles = [sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name.endswith(".rotary_emb")]
    return counter.get_total_flops() - sum(angles)


@pytest.mark.parametrize("length, kept", [(1, 1), (40, 40), (40, 10), (200, 50)])
def test_a_forward_pass_is_what_torch_counts(length, kept):
    ours = model_flops(SHAPE, [length], training=False, logits=[kept], causal=False)
    assert ours == counted(length, kept, training=False)


@pytest.mark.parametrize("length, kept", [(40, 40), (200, 50)])
def test_a_training_pass_is_what_torch_counts(length, kept):
    ours = model_flops(SHAPE, [length], training=True, logits=[kept], causal=False)
    assert ours == counted(length, kept, training=True)


def test_the_causal_half_of_attention():
    pairs = SHAPE.layers * SHAPE.heads * SHAPE.head_dim * 4
    whole, half = (model_flops(SHAPE, [50, 7], training=False, causal=causal) for causal in (False, True))
    assert whole - half == pairs * (50 * 49 // 2 + 7 * 6 // 2)
    assert half == model_flops(SHAPE, [50], training=False) + model_flops(SHAPE, [7], training=False)
    assert model_flops(SHAPE, [50, 7], training=True) == 3 * half
    assert model_flops(SHAPE, [], training=True) == 0


def test_shape_of_a_published_model():
    """Qwen3-0.6B has 0.6 B parameters, 0.44 B of them outside the embeddings (arXiv 2505.09388 and its model card)."""
    config = {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    shape = Transformer.of(config)
    assert shape.layer_weights == pytest.approx(0.44e9, rel=0.01)
    assert shape.layer_weights + shape.logit_weights == pytest.approx(0.6e9, rel=0.01)
    without = {name: value for name, value in config.items() if name not in ("head_dim", "num_key_value_heads")}
    derived = Transformer.of(without | {"num_attention_heads": 32})
    assert (derived.head_dim, derived.kv_heads) == (32, 32)


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,  # unused: every layer is a mixture
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_a_mixture_counts_its_router_and_the_chosen_experts():
    """By hand for Qwen3-30B-A3B: 30.5 B weights, 3.3 B per token, embeddings included (model card)."""
    shape = Transformer.of(QWEN3_30B_A3B)
    queries_and_output, keys_and_values = 2 * 2048 * 4096, 2 * 2048 * 512
    router, expert = 2048 * 128, 3 * 2048 * 768
    assert (queries_and_output + keys_and_values, router, expert) == (18_874_368, 262_144, 4_718_592)
    assert shape.layer_weights == 48 * (18_874_368 + 262_144 + 8 * 4_718_592) == 2_730_491_904
    assert shape.logit_weights == 2048 * 151_936 == 311_164_928
    assert shape.layer_weights + 2 * shape.logit_weights == pytest.approx(3.3e9, rel=0.02)
    assert shape.layer_weights + 48 * 120 * expert + 2 * shape.logit_weights == pytest.approx(30.5e9, rel=0.01)
    products, attention = 2 * 1000 * (2_730_491_904 + 311_164_928), 4 * 48 * 32 * 128 * 500_500
    assert model_flops(shape, [1000], training=False) == products + attention == 6_476_922_880_000
    assert model_flops(shape, [1000], training=True) == 3 * (products + attention)


@pytest.mark.parametrize("length, kept", [(1, 1), (40, 10)])
@pytest.mark.parametrize("training", [False, True])
def test_a_mixture_is_what_torch_counts(length, kept, training):
    mixture = Qwen3MoeConfig(
        **{name: getattr(CONFIG, name) for name in SAME},
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    ours = model_flops(Transformer.of(mixture.to_dict()), [length], training=training, logits=[kept], causal=False)
    assert ours == counted(length, kept, training, Qwen3MoeForCausalLM(mixture))


ROUTED = {
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("glm4_moe", {}),
        ("deepseek_v3", LATENT | {"q_lora_rank": 40}),
        ("deepseek_v3", LATENT | {"q_lora_rank": None}),
    ],
)
def test_dense_layers_shared_experts_and_latent_attention_are_what_torch_counts(family, config):
    same = {name: getattr(CONFIG, name) for name in SAME if family == "glm4_moe" or name != "head_dim"}
    made = AutoConfig.for_model(family, **same | ROUTED | config)
    model = AutoModelForCausalLM.from_config(made)
    shape = Transformer.of(made.to_dict())
    for training in (False, True):
        ours = model_flops(shape, [40], training=training, logits=[10], causal=False)
        assert ours == counted(40, 10, training, model)
    held = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name)
    assert shape.layers * shape.attention_weights + shape.mlp_weights(6) + shape.logit_weights == held


def test_a_published_mixture_with_latent_attention():
    """DeepSeek-V3 has 671 B weights, 37 B per token (arXiv 2412.19437, abstract), with its output embedding."""
    sizes = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    experts = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3}
    widths = {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280}
    counts = {"num_hidden_layers": 61, "num_attention_heads": 128, "model_type": "deepseek_v3"}
    shape = Transformer.of(sizes | experts | widths | counts)
    whole = shape.layers * shape.attention_weights + shape.mlp_weights(256) + 2 * shape.logit_weights
    assert whole == pytest.approx(671e9, rel=0.001)
    assert shape.layer_weights + shape.logit_weights == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize(
    "config, text",
    [
        (CONFIG.to_dict() | {"num_experts": 8}, "8 experts: not a mixture with the same experts"),
        (QWEN3_30B_A3B | {"mlp_only_layers": [0]}, "128 experts: not a mixture"),
        (QWEN3_30B_A3B | {"decoder_sparse_step": 2}, "128 experts: not a mixture"),
        ({"model_type": "deepseek_v2", "n_routed_experts": 256}, "256 experts: not a mixture"),
        (
            {**QWEN3_30B_A3B, "model_type": "deepseek_v3"},
            "no kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim",
        ),
        ({**QWEN3_30B_A3B, "num_experts_per_tok": None}, "no num_experts_per_tok"),
        ({"hidden_size": 4}, "no num_hidden_layers, intermediate_size, num_attention_heads, vocab_size"),
    ],
)
def test_what_is_not_a_dense_transformer_is_an_error(config, text):
    with pytest.raises(ValueError) as caught:
        Transformer.of(config)
    assert text in str(caught.value)


def test_a_shared_prompt_is_the_work_of_its_tokens_and_pairs():
    """Three samples of a prompt of 50 tokens: the responses' tokens and the pairs in which they are queries."""
    inputs, prompt = [57, 53, 50], 50
    ours = model_flops(SHAPE, inputs, training=True) - model_flops(SHAPE, [50] * 2, training=True, logits=[0] * 2)
    tokens = prompt + sum(n - prompt for n in inputs)
    pairs = sum(range(1, prompt + 1)) + sum(j for n in inputs for j in range(prompt + 1, n + 1))
    products = 2.0 * (tokens * SHAPE.layer_weights + sum(inputs) * SHAPE.logit_weights)
    assert ours == 3 * (products + 4.0 * pairs * SHAPE.layers * SHAPE.heads * SHAPE.head_dim)


@pytest.mark.parametrize("lengths, logits", [([4], [5]), ([4], [4, 4]), ([-1], None), ([4], [-1])])
def test_lengths_that_do_not_fit_are_an_error(lengths, logits):
    with pytest.raises(ValueError, match="do not fit"):
        model_flops(SHAPE, lengths, training=False, logits=logits)


@pytest.mark.parametrize(
    "device, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
    ],
)
def test_peaks_by_device_name(device, tflops):
    assert peak_tflops(device) == tflops


def test_it_loads_no_tensor_library():
    code = "import sys, ops.flops; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_hybrid_counts_the_blocks_of_each_kind():
    """By hand: states count what goes in and what comes out, and attention its own block only."""
    config = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "MM*-",
        "hidden_size": 10,
        "vocab_size": 100,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 3,
        "intermediate_size": 7,
        "mamba_num_heads": 6,
        "mamba_head_dim": 2,
        "n_groups": 2,
        "ssm_state_size": 5,
        "conv_kernel": 4,
    }
    shape = Transformer.of(config)
    mamba = 10 * (12 + (12 + 20) + 6) + 32 * 4 + 12 * 10
    assert shape.layer_weights == 2 * mamba + 10 * 3 * (4 + 2 + 2 + 4) + 2 * 10 * 7
    states, attention = 2 * 2 * 12 * 5, 2 * 4 * 3 * (8 * 9 // 2)
    assert model_flops(shape, [8], training=False) == 2 * (8 * (shape.layer_weights + states + 1000) + attention)
    assert quadratic_cost(shape) == 4 * 3 * 2 / 2 / (shape.layer_weights + states + 1000)
    with pytest.raises(ValueError, match="no mamba_head_dim"):
        Transformer.of({name: value for name, value in config.items() if name != "mamba_head_dim"})


def test_a_published_hybrid_with_latent_experts():
    """Nemotron 3 Super: 120B weights and 12B per token, says its name. By hand, one layer of each kind."""
    config = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*" + 3 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
        "hidden_size": 4096,
        "vocab_size": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
    }
    shape = Transformer.of(config)
    mamba = 4096 * (8192 + 8192 + 2048 + 128) + 10240 * 4 + 8192 * 4096
    expert, beside = 2 * 1024 * 2688, 4096 * 512 + 2 * 4096 * 1024 + 2 * 4096 * 5376
    attention = 4096 * 128 * (2 * 32 + 2 * 2)
    assert shape.layer_weights == 40 * (mamba + beside + 22 * expert) + 8 * attention
    whole = shape.mixer_weights + shape.mlp_weights(512) + 2 * shape.logit_weights
    assert 119e9 < whole < 121.5e9 and 11.5e9 < shape.layer_weights + shape.logit_weights < 12.8e9
    assert shape.undivided_weights == 40 * 4096 * (512 + 2 * 1024)
