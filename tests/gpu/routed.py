"""Samples of a mixture of experts with the experts of their tokens, scored in the same process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPE = "30B-A3B-2-layers"


def routed(rank: int, folder: str, tokens: int) -> list[dict[str, float]]:
    """Sample with vLLM twice, before and after a refit with other weights, prompts from its prefix cache included.
    Return, for each, the mean k3 estimates of the sampler's distance from transformers in bfloat16: with its own
    experts ("own") and with the sampler's ("replayed"), and the fraction of tokens and layers whose experts differ
    ("differing")."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu.shapes import model_of
    from ops.kl import kl_k3
    from ops.refit.transports import TRANSPORTS
    from pipeline import Model, StageContext, WorkerGroup
    from pipeline.declare.sharding import Dynamic, Sharding
    from stages.backends import Draws, Sampling, engine, one_shard
    from stages.backends.model.places import placed
    from stages.backends.refit.source import Source
    from stages.backends.torch.routers import Routers
    from stages.backends.torch.score import score
    from tests.gpu.samples import PROMPTS

    model = Model(model_of(SHAPE, Path(folder)), router_replay=True)
    group = WorkerGroup("sampler", backend="vllm", gpus=1, threads=1, memory=0.5)
    backend = engine(
        StageContext(group=group, rank=0, seed=0, group_size=8, run_dir=Path(folder), shared={}),
    )
    network = AutoModelForCausalLM.from_pretrained(model.source, dtype=torch.bfloat16).cuda().eval()
    routers, found = Routers(network), []
    prompts = backend.encode(model, [f"{'What is the sum of these two numbers? ' * 4}{text}" for text in PROMPTS])
    draws = Draws(0, tuple(i // 8 for i in range(64)), tuple(i % 8 for i in range(64)))
    for version in range(2):
        if version:
            with torch.no_grad():
                for index, parameter in enumerate(network.parameters()):
                    noise = torch.Generator("cuda").manual_seed(index)
                    parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=noise, device="cuda"))
            tensors, places, held = placed(network, torch.bfloat16)
            share = Source(torch.device("cuda", 0), 0, tensors, places, held).share(held, TRANSPORTS["pull"])
            backend.serve(model, [share], version)
        made = backend.generate(model, prompts, Sampling(tokens, routes=True), draws)
        shard = one_shard(prompts, made.response_ids, Sharding.of(Dynamic(4096)))
        given: Any = (network, prompts, made.response_ids, shard)
        own = score(*given, temperature=1.0, pad=0)
        routers.disagreement.clear()
        replayed = score(*given, temperature=1.0, pad=0, routers=routers, routes=made.routes)
        distances = [float(kl_k3(made.logprobs.values, scored.values).mean()) for scored in (own, replayed)]
        differing = routers.disagreement.share(network.device)
        found.append({"own": distances[0], "replayed": distances[1], "differing": differing})
    backend.close()
    return found
