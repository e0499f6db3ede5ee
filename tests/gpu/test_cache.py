"""A cache of 8-bit floats samples nearly what one of the model's own number format does, however large keys and values
are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.shapes import model_of
from tests.gpu.processes import each
from tests.gpu.samples import sampled, scored
from tests.gpu.scaled import LARGE, rescaled
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


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_keys_and_values_far_above_448_are_scaled(tmp_path: Path) -> None:
    """In captured CUDA graphs too, which were captured with the scales of the folder's weights or with 1."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("vLLM has FlashAttention 3 on Hopper")
    model_of("0.6B", tmp_path)  # not within the time of an engine's start
    (found,) = each(rescaled, ["0"], str(tmp_path), 64)
    assert not isinstance(found, BaseException), found
    print("mean difference of logprobs:", found["far"])
    print("scales:", {name: value for name, value in found["record"].items() if name.startswith("cache_scale")})
    for number, (q, k, v) in found["start"].items():
        assert found["after"][number] == (q / LARGE, k * LARGE, v * LARGE), number
    assert found["as offered"] and found["record"]["cache_scale_v_max"] > 1
    close = [found["far"][name] for name in ("folder", "refit", "awake")]
    assert max(close) < 0.1 and max(close) < 1.5 * min(close)
    assert found["far"]["ones"] > 2 * max(close)
