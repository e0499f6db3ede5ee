"""vLLM's second model runner samples what the first one does."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.processes import each
from tests.gpu.samples import sampled
from tests.optional import need

need("vllm", "vllm")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_runners_sample_the_same(tmp_path):
    made = [
        each(sampled, ["0"], str(tmp_path), 128, environment={"VLLM_USE_V2_MODEL_RUNNER": runner})[0] for runner in "01"
    ]
    for one in made:
        assert not isinstance(one, BaseException), one
    (lengths, tokens, logprobs), (others, other_tokens, other_logprobs) = made
    assert lengths == others
    same = tokens == other_tokens
    assert same.float().mean() > 0.95  # kernels may round differently once, and then the sample is another one
    assert (logprobs - other_logprobs)[same].abs().mean() < 1e-3
