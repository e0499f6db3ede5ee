"""Runs Megatron-core on the CPU although it asks for CUDA by name. Active only on the CPU, and only while it runs.

Megatron-core 0.16 allocates with device="cuda", calls `.cuda()`, compares type names and synchronizes the device in its
pipeline schedule, gradient buffers and optimizer. Inside `on_cpu()` those calls mean the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside this context, CUDA means the CPU. Reentrant."""
    device, wait = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = _cpu  # type: ignore[assignment]
    torch.cuda.synchronize = _wait
    try:
        with _CudaIsCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = device, wait


class _CudaIsCpu(TorchFunctionMode):
    """Rewrites the device of factory calls and the type that tensors report."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            on_cuda = str(kwargs.get("device")).startswith("cuda")
            return func(*args, **{**kwargs, "device": "cpu"} if on_cuda else kwargs)
        if func is torch.Tensor.type and len(args) == 1:  # Megatron-core compares it with "torch.cuda.FloatTensor"
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args)


def _cpu() -> torch.device:
    return torch.device("cpu")


def _wait(device: Any = None) -> None:
    pass
