"""Samples of a model of a real shape, from an engine in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def sampled(rank: int, folder: str, tokens: int, cache: Any = "auto") -> tuple[list[int], Any, Any]:
    """Return the lengths, tokens and logprobs of 64 samples of at most `tokens` tokens."""
    from benchmarks.gpu.shapes import model_of
    from pipeline import Model, StageContext, WorkerGroup
    from stages.backends import Draws, Sampling, engine

    group = WorkerGroup("sampler", backend="vllm", gpus=1, threads=1, memory=0.5, cache=cache)
    context = StageContext(group=group, rank=0, seed=0, group_size=8, run_dir=Path(folder), shared={})
    backend, model = engine(context), Model(model_of("0.6B", Path(folder)))
    ids = backend.encode(model, [f"{i // 8}+{i // 8}=" for i in range(64)])
    draws = Draws(0, tuple(i // 8 for i in range(64)), tuple(i % 8 for i in range(64)))
    made = backend.generate(model, ids, Sampling(tokens), draws)
    return list(made.response_ids.lengths), made.response_ids.values, made.logprobs.values
