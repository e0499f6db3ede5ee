"""How far the trainer's logprobs are from the sampler's, with each its own experts and with the sampler's experts.

python -m benchmarks.router_replay [--layers 6] [--experts 32] [--chosen 4] [--samples 64] [--tokens 32] [--out FILE]

A random mixture of experts samples on the torch backend, and a trainer scores the tokens in float32. "bfloat16" samples
in bfloat16 with the same weights; "noise 0.1 %" and "noise 1 %" sample in float32 with weights that differ by this part
of themselves, as those of an older policy version do. "own" and "replayed" are the k3 estimates of the KL divergence in
nat per token (train/mismatch_kl), "ratio" is the first over the second, and "other experts %" is
train/router_disagreement: tokens and layers for which the trainer's router would have chosen other experts.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.report import report

VARIANTS = {"bfloat16": 0.0, "noise 0.1 %": 0.001, "noise 1 %": 0.01}
ALPHABET = "0123456789abcdef"


def model_of(options: argparse.Namespace) -> Any:
    """A random mixture, far enough from uniform that its tokens differ."""
    from pipeline import Model

    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
        "num_hidden_layers": options.layers, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": options.experts, "num_experts_per_tok": options.chosen, "norm_topk_prob": True,
        "initializer_range": 0.15, "tie_word_embeddings": False,
    }  # fmt: skip
    return Model("mixture", config=config, alphabet=ALPHABET, router_replay=True)


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The line of one sampler."""
    import torch

    from ops.kl import kl_k3
    from pipeline.declare.sharding import Packed, Sharding
    from stages.backends import Draws, Sampling, one_shard
    from stages.backends.torch.engine import TorchEngine

    model, cpu = model_of(options), torch.device("cpu")
    backend = TorchEngine(cpu, torch.float32)
    served = backend.network(model, "served")
    with torch.no_grad():
        for number, weight in enumerate(served.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.mul_(1.0 + VARIANTS[name] * noise)
    if name == "bfloat16":
        served.bfloat16()
    prompts = backend.encode(model, [ALPHABET[i % 16] * (1 + i % 7) for i in range(options.samples)])
    draws = Draws(0, tuple(range(options.samples)), (0,) * options.samples)
    made = backend.generate(model, prompts, Sampling(options.tokens, routes=True), draws)
    shard = one_shard(prompts, made.response_ids, Sharding.of(Packed(4096)))
    given = (model, prompts, made.response_ids, shard)
    own = backend.score(*given, temperature=1.0)
    replayed = backend.score_replayed(*given, temperature=1.0, routes=made.routes)
    routers = backend.routers(model, "trained")
    kl = [float(kl_k3(made.logprobs.values, scored.values).mean()) for scored in (own, replayed)]
    return {
        "sampler": name,
        "tokens": len(made.logprobs.values),
        "own": kl[0],
        "replayed": kl[1],
        "ratio": kl[0] / kl[1],
        "other experts %": 100 * routers.disagreement.share(cpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("experts", 32), ("chosen", 4), ("samples", 64), ("tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = [measured(name, options) for name in VARIANTS]
    shape = f"{options.layers} layers, {options.chosen} of {options.experts} experts"
    columns = ["sampler", "tokens", "own", "replayed", "ratio", "other experts %"]
    report("router_replay", rows, columns, f"{shape}; k3 in nat per token", options.out)


if __name__ == "__main__":
    main()
