"""Models of real shapes with random weights, as Hugging Face folders, initialized on a GPU if there is one.

python -m benchmarks.gpu.shapes 4B FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
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
DEADLINE_S = 600.0


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the workload: the model, and the numbers of groups, samples and tokens."""
    parser.add_argument("--model", choices=SHAPES, default="0.6B")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)


def model_of(name: str, folder: Path) -> str:
    """The path of a model's folder within `folder`. A separate process writes it and leaves nothing on the GPU."""
    path = folder / f"qwen3-{name}"
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
    shape = (SHAPES | MIXTURES)[name] | ends
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if gpu else torch.float32)
    save(network, tokenizer, Path(path))


if __name__ == "__main__":
    main()
