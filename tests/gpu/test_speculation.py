"""On a GPU, drafts change no sample but by rounding, and a draft model that is the policy is always right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.processes import each
from tests.gpu.samples import drafted, sampled
from tests.optional import need

need("vllm", "vllm")

TOKENS, DRAFTS = 64, 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("draft", ["", "0.6B"], ids=["ngrams", "model"])
def test_drafts_change_samples_by_rounding_only(tmp_path: Path, draft: str) -> None:
    (plain,) = each(sampled, ["0"], str(tmp_path), TOKENS)
    (other,) = each(drafted, ["0"], str(tmp_path), TOKENS, DRAFTS, draft)
    for one in (plain, other):
        assert not isinstance(one, BaseException), one
    lengths, tokens, logprobs = plain
    other_lengths, other_tokens, other_logprobs, passes = other
    rows = zip(tokens.split(lengths), other_tokens.split(other_lengths))
    same = [torch.equal(before, after) for before, after in rows]
    assert sum(same) > len(same) / 2, "bfloat16 tips a token of a sample now and then"
    pairs = zip(same, logprobs.split(lengths), other_logprobs.split(other_lengths))
    assert max(float((before - after).abs().mean()) for is_same, before, after in pairs if is_same) < 0.02
    if draft:
        assert passes < 1.5 * sum(other_lengths) / (DRAFTS + 1)
