"""Samples of an engine with 8-bit weights, received in a refit or loaded, each from a process of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def refitted(rank: int, folder: str, tokens: int) -> dict[str, Any]:
    """Sample 64 times with 8-bit weights that an engine received in a refit, and score the tokens with networks of the
    same weights: dequantized ("dequantized"), and as they were ("exact"). Writes the weights into `folder`/other."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu.shapes import model_of
    from ops.quantize import dequantized, quantized
    from ops.refit.share import digest_of
    from ops.refit.transports import TRANSPORTS
    from pipeline import Model
    from stages.backends.model.blocks import is_quantized
    from stages.backends.model.places import placed
    from stages.backends.refit.source import Source

    network = AutoModelForCausalLM.from_pretrained(model_of("0.6B", Path(folder)), dtype=torch.bfloat16).cuda()
    with torch.no_grad():
        for index, parameter in enumerate(network.parameters()):
            noise = torch.Generator("cuda").manual_seed(index)
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=noise, device="cuda"))
    other = Path(folder) / "other"
    shutil.copytree(model_of("0.6B", Path(folder)), other, ignore=shutil.ignore_patterns("*.safetensors*"))
    network.save_pretrained(other)
    tensors, places, held = placed(network, torch.bfloat16)
    source = Source(torch.device("cuda", 0), 0, tensors, places, held, quantize=lambda tensor, how: None)
    share = source.share(held, TRANSPORTS["pull"])
    found: dict[str, Any] = {"error": share.record["quant_error"]}
    backend = _backend(folder)
    served = backend.serve(Model(model_of("0.6B", Path(folder))), [share], 1)
    found |= {"as offered": served.sha256 == digest_of([share]), **served.record}
    made, ids = samples_of(backend, Model(model_of("0.6B", Path(folder))), tokens)
    found["sampled"] = made.response_ids.lengths, made.response_ids.values, made.logprobs.values
    found["exact"] = scores_of(network, ids, made)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if is_quantized(name):
                parameter.copy_(dequantized(*quantized(parameter)))  # four bits fit into a bfloat16
    found["dequantized"] = scores_of(network, ids, made)
    backend.close()
    return found


def loaded(rank: int, folder: str, tokens: int) -> tuple[list[int], Any, Any]:
    """Return the samples of an engine that starts from the weights which `refitted` wrote, quantized."""
    from pipeline import Model

    backend = _backend(folder)
    made, _ = samples_of(backend, Model(str(Path(folder) / "other")), tokens)
    backend.close()
    return list(made.response_ids.lengths), made.response_ids.values, made.logprobs.values


def scores_of(network: Any, ids: Any, made: Any) -> Any:
    """Return the logprobs of the samples' tokens by a network on a GPU, float32 on the CPU."""
    import torch

    rows = []
    with torch.no_grad():
        for prompt, response in zip(ids.rows(), made.response_ids.rows()):
            logits_TV = network(torch.cat([prompt, response])[None].cuda()).logits[0, len(prompt) - 1 : -1].float()
            rows.append(logits_TV.log_softmax(-1).gather(-1, response[:, None].cuda())[:, 0].cpu())
    return torch.cat(rows)


def _backend(folder: str) -> Any:
    from pipeline import StageContext, WorkerGroup
    from stages.backends import engine

    group = WorkerGroup("sampler", backend="vllm", gpus=1, threads=1, memory=0.5, weights="fp8")
    return engine(StageContext(group=group, rank=0, seed=0, group_size=8, run_dir=Path(folder), shared={}))


def samples_of(backend: Any, model: Any, tokens: int) -> tuple[Any, Any]:
    """Return 64 samples, and their prompts."""
    from stages.backends import Draws, Sampling

    ids = backend.encode(model, [f"{i // 8}+{i // 8}=" for i in range(64)])
    draws = Draws(0, tuple(i // 8 for i in range(64)), tuple(i % 8 for i in range(64)))
    return backend.generate(model, ids, Sampling(tokens), draws), ids
