"""On a GPU, a trainer that has the sampler's experts is closer to it than one that chooses its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.processes import each
from tests.gpu.routed import routed
from tests.optional import need

need("vllm", "vllm")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_experts_that_vllm_chose_bring_the_trainer_closer_before_and_after_a_refit(tmp_path: Path) -> None:
    (found,) = each(routed, ["0"], str(tmp_path), 64)
    assert not isinstance(found, BaseException), found
    print(found)
    for version in found:
        assert 0.0 < version["differing"] < 0.2, "experts of other tokens would differ nearly always"
        assert version["replayed"] < version["own"]
