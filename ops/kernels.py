"""Whether this project's Triton kernels can take a tensor. Loads no Triton."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

_WIDTHS = (torch.bfloat16, torch.float16, torch.float32)


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return whether it is on a GPU, in a dtype that the kernels compute in, and Triton is installed."""
    return tensor.is_cuda and tensor.dtype in _WIDTHS and has_triton()
