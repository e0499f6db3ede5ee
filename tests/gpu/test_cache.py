"""A cache of 8-bit floats samples nearly what one of the model's own number format does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.processes import each
from tests.gpu.samples import sampled, scored
from tests.optional import need

need("vllm", "vllm")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_8_bit_cache_samples_nearly_what_the_network_says(tmp_path: Path) -> None:
    means = []
    for cache in ("auto", "fp8"):
        (made,) = each(sampled, ["0"], str(tmp_path), 64, cache)
        assert not isinstance(made, BaseException), made
        lengths, tokens, logprobs = made
        (others,) = each(scored, ["0"], str(tmp_path), lengths, tokens)
        assert not isinstance(others, BaseException), others
        means.append(float((logprobs - others).abs().mean()))
    print("mean difference of logprobs:", means)
    assert means[0] < 0.03
    assert means[0] < means[1] < 0.1, "the cache is another one, and close"
