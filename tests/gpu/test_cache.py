"""A cache of 8-bit floats samples nearly what one of the model's own number format does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.processes import each
from tests.optional import need

need("vllm", "vllm")


def sampled(rank: int, folder: str, cache: Any) -> tuple[list[int], Any, Any]:
    """Return the lengths, tokens and logprobs of 64 samples."""
    from benchmarks.gpu.shapes import model_of
    from pipeline import Model, StageContext, WorkerGroup
    from stages.backends import Draws, Sampling, engine

    group = WorkerGroup("sampler", backend="vllm", gpus=1, threads=1, memory=0.5, cache=cache)
    context = StageContext(group=group, rank=0, seed=0, group_size=8, run_dir=Path(folder), shared={})
    backend, model = engine(context), Model(model_of("0.6B", Path(folder)))
    ids = backend.encode(model, [f"{i // 8}+{i // 8}=" for i in range(64)])
    draws = Draws(0, tuple(i // 8 for i in range(64)), tuple(i % 8 for i in range(64)))
    made = backend.generate(model, ids, Sampling(64), draws)
    return list(made.response_ids.lengths), made.response_ids.values, made.logprobs.values


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_caches_sample_nearly_the_same(tmp_path: Path) -> None:
    found = [each(sampled, ["0"], str(tmp_path), cache)[0] for cache in ("auto", "fp8")]
    for one in found:
        assert not isinstance(one, BaseException), one
    (lengths, tokens, logprobs), (others, other_tokens, other_logprobs) = found
    assert lengths == others
    same = tokens == other_tokens
    assert same.float().mean() > 0.3  # once a token is another one, the rest of its sample is another one
    difference = (logprobs - other_logprobs)[same].abs().mean()
    assert 0 < difference < 0.05, "the cache is another one, and close"
