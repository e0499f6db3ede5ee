"""Tests that need a GPU. On a machine that has one: python -m pytest tests/gpu -n0"""

import pytest
import torch

from tests.optional import lacking


@pytest.fixture(autouse=True, scope="session")
def gpus() -> list[str]:
    """The machine's GPUs, as values for CUDA_VISIBLE_DEVICES."""
    if not torch.cuda.is_available():
        lacking("gpu", "this machine has no GPU")
    return [str(index) for index in range(torch.cuda.device_count())]
