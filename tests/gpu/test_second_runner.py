"""vLLM's second model runner samples what the first one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.processes import each
from tests.optional import need

need("vllm", "vllm")


def sampled(rank: int, folder: str) -> tuple[list[int], Any, Any]:
    """Return the lengths, tokens and logprobs of 64 samples."""
    from benchmarks.gpu.shapes import model_of
    from pipeline import Model, StageContext, WorkerGroup
    from stages.backends import Draws, Sampling, engine

    group = WorkerGroup("sampler", backend="vllm", gpus=1, threads=1, memory=0.5)
    context = StageContext(group=group, rank=0, seed=0, group_size=8, run_dir=Path(folder), shared={})
    backend, model = engine(context), Model(model_of("0.6B", Path(folder)))
    ids = backend.encode(model, [f"{i // 8}+{i // 8}=" for i in range(64)])
    draws = Draws(0, tuple(i // 8 for i in range(64)), tuple(i % 8 for i in range(64)))
    made = backend.generate(model, ids, Sampling(128), draws)
    return list(made.response_ids.lengths), made.response_ids.values, made.logprobs.values


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_runners_sample_the_same(tmp_path):
    made = [each(sampled, ["0"], str(tmp_path), environment={"VLLM_USE_V2_MODEL_RUNNER": runner})[0] for runner in "01"]
    for one in made:
        assert not isinstance(one, BaseException), one
    (lengths, tokens, logprobs), (others, other_tokens, other_logprobs) = made
    assert lengths == others
    same = tokens == other_tokens
    assert same.float().mean() > 0.95  # kernels may round differently once, and then the sample is another one
    assert (logprobs - other_logprobs)[same].abs().mean() < 1e-3
