"""Tiny model folders, worker contexts and reference logprobs for the tests of the vLLM backend."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ops.refit.share import Share
from pipeline import Model, StageContext, WorkerGroup
from pipeline.declare.columns import Ragged
from stages.backends import Draws, Generation
from stages.backends.model.build import build, character_tokenizer, load_network, save
from stages.backends.model.weights import weights
from tests.shares import shares_of

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +=?"
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
GROUP = WorkerGroup("sampler", backend="vllm", threads=1)
PROMPTS = ("3 + 4 = ?", "10 + 20 = ?", "abc", "what is 7?")


def folder(root: Path, seed: int) -> Model:
    """Return a Qwen3 with random weights so large that its distributions are far from flat."""
    described = Model("tiny", config=QWEN3, alphabet=ALPHABET, seed=seed)
    tokenizer = character_tokenizer(ALPHABET)
    network = build(described, tokenizer)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    save(network, tokenizer, root / f"qwen3-{seed}")
    return Model(str(root / f"qwen3-{seed}"))


def context(root: Path, group: WorkerGroup = GROUP) -> StageContext:
    return StageContext(group=group, rank=0, seed=0, group_size=4, run_dir=root, shared={})


def draws(groups: tuple[int, ...], size: int = 4, seed: int = 0) -> Draws:
    """Return the draws of whole groups."""
    return Draws(seed, tuple(group for group in groups for _ in range(size)), tuple(range(size)) * len(groups))


def texts(groups: tuple[int, ...], size: int = 4) -> list[str]:
    """Return one prompt per group, repeated for each of its samples."""
    return [PROMPTS[group % len(PROMPTS)] for group in groups for _ in range(size)]


def reference(model: Model) -> PreTrainedModel:
    """Return the transformers network in float32."""
    return load_network(model, character_tokenizer(ALPHABET), dtype=torch.float32, device=torch.device("cpu"))


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    """Return the model's weights by name."""
    return weights(reference(model))


def shares(model: Model, *, near: bool = True) -> list[Share]:
    """Return the model's weights as shares of a trainer."""
    return shares_of(weights_of(model), near=near)


@torch.no_grad()
def logprobs(network: PreTrainedModel, prompt_ids: Ragged, made: Generation, temperature: float) -> list[torch.Tensor]:
    """Return the logprobs of each sample's tokens under softmax(logits / temperature) over the whole vocabulary."""
    rows = []
    for prompt, response in zip(prompt_ids.rows(), made.response_ids.rows()):
        logits_TV = network(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows.append((logits_TV / temperature).log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return rows


def farthest(made: Generation, rows: list[torch.Tensor]) -> float:
    """Return the largest difference between the logprobs of a generation and `rows`."""
    return float((made.logprobs.values - torch.cat(rows)).abs().max())
