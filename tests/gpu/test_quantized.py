"""8-bit weights: an engine that received them in a refit samples as a network of the dequantized weights would, and as
an engine that loaded them from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.shapes import model_of
from ops.quantize import dequantized, largest, quantized, scales
from tests.gpu.processes import each
from tests.gpu.refitted import loaded, refitted
from tests.optional import need


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_quantizes_to_the_bytes_of_a_cpu() -> None:
    random = torch.Generator().manual_seed(0)
    matrix = (torch.randn(700, 900, generator=random) * torch.exp2(torch.arange(900) / 20 - 22)).bfloat16()
    (weight, scale), (here, its) = quantized(matrix.cuda()), quantized(matrix)
    assert torch.equal(weight.cpu().view(torch.uint8), here.view(torch.uint8)) and torch.equal(scale.cpu(), its)
    assert torch.equal(dequantized(weight, scale).bfloat16().float(), dequantized(weight, scale))
    assert torch.equal(scales(largest(dequantized(weight, scale))), scale)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_refit_brings_what_a_folder_has(tmp_path: Path) -> None:
    need("vllm", "vllm")
    model_of("0.6B", tmp_path)  # not within the time of an engine's start
    found = each(refitted, ["0"], str(tmp_path), 64)[0]
    assert not isinstance(found, BaseException), found
    if torch.cuda.get_device_capability() == (9, 0):
        assert found["through_loader"] == 0, "written in place"
    assert found["as offered"] and 0.02 < found["error"] < 0.03
    lengths, tokens, logprobs = found["sampled"]
    near, far = ((logprobs - found[kind]).abs().mean() for kind in ("dequantized", "exact"))
    print("mean difference of logprobs from dequantized and from exact weights:", near, far)
    assert near < min(0.15, far), "what is left is the rounding of activations"
    fresh = each(loaded, ["0"], str(tmp_path), 64)[0]
    assert not isinstance(fresh, BaseException), fresh
    others, other_tokens, other_logprobs = fresh
    assert list(lengths) == others
    common, differences = [], []
    parts = (one.split(others) for one in (tokens, other_tokens, logprobs, other_logprobs))
    for before, after, here, there in zip(*parts):
        differs = (before != after).nonzero()
        common.append(int(differs[0]) if len(differs) else len(before))
        differences.append((here[: common[-1]] - there[: common[-1]]).abs())
    print("tokens in common:", common)
    assert sum(common) / len(common) > 16, "bfloat16 tips a token now and then, and then the rest of its sample"
    assert torch.cat(differences).mean() < 5e-3
