"""Models of real shapes with random weights, as Hugging Face folders, initialized on a GPU if there is one.

python -m benchmarks.gpu.shapes 4B FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3 | dict(zip(SIZES, (1024, 3072, 28, 16))),
    "4B": QWEN3 | dict(zip(SIZES, (2560, 9728, 36, 32))),
    "8B": QWEN3 | dict(zip(SIZES, (4096, 12288, 36, 32))) | {"tie_word_embeddings": False},
    "tiny": QWEN3 | dict(zip(SIZES, (64, 128, 2, 8))) | {"vocab_size": 2048, "head_dim": 32},
}
MIXTURE = QWEN3 | {  # huggingface.co/Qwen/Qwen3-30B-A3B, config.json, except for the number of layers
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "30B-A3B-2-layers": MIXTURE | {"num_hidden_layers": 2},
    "tiny-mixture": MIXTURE
    | {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "vocab_size": 2048}
    | {"num_experts_per_tok": 2, "head_dim": 32, "num_attention_heads": 8},
}
SIGMOID: dict[str, Any] = {  # a mixture that sigmoids route
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "tie_word_embeddings": False,
}  # fmt: skip
NANO: dict[str, Any] = {  # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: one layer of each kind, and a second mixture
    name: size for name, size in SIGMOID.items() if name != "first_k_dense_replace"
} | {
    "model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention", "moe"], "hidden_size": 2688,
    "intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
    "conv_kernel": 4, "chunk_size": 128, "vocab_size": 131072, "max_position_embeddings": 262144,
    "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
}  # fmt: skip
TRUNCATED: dict[str, dict[str, Any]] = {  # layers of true shapes, from config.json of the models on huggingface.co
    "glm-4.5-air-2-layers": SIGMOID | {  # zai-org/GLM-4.5-Air: a dense layer and a mixture
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 2, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "attention_bias": True, "use_qk_norm": False,
        "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "vocab_size": 151552,
        "max_position_embeddings": 131072,
    },
    "deepseek-v3-2-layers": SIGMOID | {  # deepseek-ai/DeepSeek-V3: a dense layer, and a mixture with 32 of 256 experts
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 2, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 32, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6, "vocab_size": 129280, "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
        },
    },
    "nemotron-3-nano-4-layers": NANO,
    "nemotron-3-super-3-layers": NANO | {  # Nemotron 3 Super, with sizes from where benchmarks/refit_plan.py has them
        "layers_block_type": ["mamba", "moe", "attention"], "hidden_size": 4096, "intermediate_size": 2688,
        "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024,
        "n_routed_experts": 512, "num_experts_per_tok": 22, "routed_scaling_factor": 5.0, "mamba_num_heads": 128,
    },
}  # fmt: skip
DEADLINE_S = 600.0


def add_work(parser: argparse.ArgumentParser, models: Collection[str] = SHAPES) -> None:
    """Add the flags of the workload: the model, and the numbers of groups, samples and tokens."""
    parser.add_argument("--model", choices=models, default="0.6B")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)


def model_of(name: str, folder: Path) -> str:
    """The path of a model's folder within `folder`. A separate process writes it and leaves nothing on the GPU."""
    path = folder / name
    if not path.exists():
        command = [sys.executable, "-m", "benchmarks.gpu.shapes", name, str(path)]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
    return str(path)


def main() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stages.backends.model.build import byte_tokenizer, save

    name, path = sys.argv[1:]
    tokenizer, gpu = byte_tokenizer(), torch.cuda.is_available()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    shape = (SHAPES | MIXTURES | TRUNCATED)[name] | ends
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if gpu else torch.float32)
    save(network, tokenizer, Path(path))


if __name__ == "__main__":
    main()
