"""Samples of a model of a real shape, from an engine in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def sampled(rank: int, folder: str, tokens: int, cache: Any = "auto") -> tuple[list[int], Any, Any]:
    """Return the lengths, tokens and logprobs of 64 samples of at most `tokens` tokens."""
    made = _made(folder, tokens, cache=cache)
    return list(made.response_ids.lengths), made.response_ids.values, made.logprobs.values


def drafted(rank: int, folder: str, tokens: int, speculate: int, draft: str) -> tuple[list[int], Any, Any, int]:
    """Return the same of samples with drafts, by a model of the shape `draft` or else by n-grams, and the passes of the
    model."""
    from benchmarks.gpu.shapes import model_of
    from pipeline import Model

    by = Model(model_of(draft, Path(folder))) if draft else None
    made = _made(folder, tokens, speculate=speculate, draft=by)
    return list(made.response_ids.lengths), made.response_ids.values, made.logprobs.values, made.passes


def _made(folder: str, tokens: int, **settings: Any) -> Any:
    from benchmarks.gpu.shapes import model_of
    from pipeline import Model, StageContext, WorkerGroup
    from stages.backends import Draws, Sampling, engine

    group = WorkerGroup("sampler", backend="vllm", gpus=1, threads=1, memory=0.5, **settings)
    context = StageContext(group=group, rank=0, seed=0, group_size=8, run_dir=Path(folder), shared={})
    backend, model = engine(context), Model(model_of("0.6B", Path(folder)))
    ids = backend.encode(model, [f"{i // 8}+{i // 8}=" for i in range(64)])
    draws = Draws(0, tuple(i // 8 for i in range(64)), tuple(i % 8 for i in range(64)))
    return backend.generate(model, ids, Sampling(tokens), draws)
