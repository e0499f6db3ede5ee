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
TEMPERATURE = 0.02  # at 1, random weights choose among all tokens alike, and any rounding tips one


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("draft", ["", "0.6B"], ids=["ngrams", "model"])
def test_drafts_change_samples_by_rounding_only(tmp_path: Path, draft: str) -> None:
    (plain,) = each(sampled, ["0"], str(tmp_path), TOKENS, "auto", TEMPERATURE)
    (other,) = each(drafted, ["0"], str(tmp_path), TOKENS, DRAFTS, draft, TEMPERATURE)
    for one in (plain, other):
        assert not isinstance(one, BaseException), one
    lengths, tokens, logprobs = plain
    other_lengths, other_tokens, other_logprobs, passes = other
    common, differences = [], []
    parts = (tokens.split(lengths), other_tokens.split(other_lengths))
    for before, after, here, there in zip(*parts, logprobs.split(lengths), other_logprobs.split(other_lengths)):
        size = min(len(before), len(after))
        differs = (before[:size] != after[:size]).nonzero()
        common.append(int(differs[0]) if len(differs) else size)
        differences.append((here[: common[-1]] - there[: common[-1]]).abs())
    print("tokens in common:", common, "passes:", passes, "of", sum(other_lengths))
    assert sum(common) / len(common) > 4, "bfloat16 tips a token now and then, and then the rest of its sample"
    assert float(torch.cat(differences).mean()) < 0.5, "rounding, divided by the temperature"
    if draft:
        assert passes < 0.75 * sum(other_lengths)
