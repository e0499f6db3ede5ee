"""A cache of 8-bit floats samples nearly what one of the model's own number format does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.processes import each
from tests.gpu.samples import sampled
from tests.optional import need

need("vllm", "vllm")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_caches_sample_nearly_the_same(tmp_path: Path) -> None:
    found = [each(sampled, ["0"], str(tmp_path), 64, cache)[0] for cache in ("auto", "fp8")]
    for one in found:
        assert not isinstance(one, BaseException), one
    (lengths, tokens, logprobs), (others, other_tokens, other_logprobs) = found
    assert lengths == others
    same = tokens == other_tokens
    assert same.float().mean() > 0.3  # once a token is another one, the rest of its sample is another one
    difference = (logprobs - other_logprobs)[same].abs().mean()
    assert 0 < difference < 0.05, "the cache is another one, and close"
