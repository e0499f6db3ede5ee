"""A version of the weights as vLLM's workers are told of it. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ops.refit.layout import Tensor
from ops.refit.memory import Handle, Kept, SharedMemory
from ops.refit.share import Share
from stages.backends.interface import Route
from stages.backends.model.places import placed


@lru_cache(maxsize=1)
def expected(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the model in a folder, a tied one under its first name."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    network.tie_weights()
    return placed(network)[0]


class Weights:
    """The shares of a version, in memory that processes of this machine open, as long as this object lives; or, of
    those that the trainer carries, where to meet it.

    What came as bytes is put into memory for it.
    """

    def __init__(self, shares: Sequence[Share], version: int, route: Route) -> None:
        self.shares, self.version, self.route = list(shares), version, route
        self._own = {i: _landed(s.memory) for i, s in enumerate(shares) if isinstance(s.memory, np.ndarray)}

    def told(self) -> dict[str, Any]:
        """What `transfer.Offered` takes."""
        handles = [_handle(self._own.get(i, share.memory)) for i, share in enumerate(self.shares)]
        plain = [msgspec.to_builtins(handle, builtin_types=(bytes,)) for handle in handles]
        return {
            "shares": [[share.layout, memory] for share, memory in zip(self.shares, plain)],
            "version": self.version,
            "route": msgspec.to_builtins(self.route),
        }


def _landed(content: np.ndarray) -> SharedMemory:
    memory = SharedMemory(content.nbytes, torch.device("cpu"))
    memory.bytes.numpy()[:] = content
    return memory


def _handle(memory: SharedMemory | Handle | np.ndarray | Kept) -> Handle | Kept:
    assert not isinstance(memory, np.ndarray)
    return memory.handle if isinstance(memory, SharedMemory) else memory
