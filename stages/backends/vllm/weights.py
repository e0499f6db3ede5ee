"""Converts a version of the weights to plain values for vLLM's workers, and back. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import torch
from transformers import AutoConfig

from ops.refit.layout import Tensor
from ops.refit.memory import Handle, Mark, SharedMemory
from ops.refit.share import Share
from ops.refit.sums import Summed
from ops.refit.transports import TRANSPORTS, Transport
from pipeline.declare.task import MeetingPlace
from stages.backends.interface import Route
from stages.backends.model.adapters import attach
from stages.backends.model.blocks import quantized_tensors
from stages.backends.model.build import auto_class
from stages.backends.model.cache_bounds import Bounds
from stages.backends.model.places import placed
from stages.backends.refit.target import Received
from stages.images import is_seeing
from stages.lora import LoRA
from stages.pickling import pickled


@lru_cache(maxsize=1)
def expected(folder: Path, dtype: torch.dtype, lora: LoRA | None = None, weights: str = "auto") -> dict[str, Tensor]:
    """The tensors of a model folder, quantized if `weights` is "fp8", or of its adapter; a tied one appears under its
    first name."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        network = auto_class(is_seeing(config.to_dict())).from_config(config, dtype=dtype)
        if lora is not None:
            attach(network, lora, seed=0, where=str(folder))
    network.tie_weights()
    tensors = placed(network)[0]
    return quantized_tensors(tensors) if weights == "fp8" else tensors


class VersionShares:
    """The shares of a version, in memory that other processes on this machine can open while this object lives; or, for
    a two-sided transport, where to meet the trainer.

    Shares that arrived as bytes are copied into such memory.
    """

    def __init__(self, shares: Sequence[Share], version: int, route: Route) -> None:
        self.shares, self.version, self.route = list(shares), version, route
        self._own = {i: _landed(s.memory) for i, s in enumerate(shares) if isinstance(s.memory, np.ndarray)}

    def plain(self) -> dict[str, Any]:
        """The arguments of `transfer.Offered`."""
        memories = [_plain(self._own.get(i, share.memory)) for i, share in enumerate(self.shares)]
        transport = self.route.transport
        is_ours = TRANSPORTS.get(transport.name) is transport
        return {
            "shares": [[share.layout, memory] for share, memory in zip(self.shares, memories)],
            "version": self.version,
            "transport": transport.name if is_ours else pickled(transport),
            "meeting": msgspec.to_builtins(self.route.meeting),
        }


class RankAnswer(msgspec.Struct, frozen=True):
    """A rank's report on a version: its `Received`, the tensors that went through vLLM's loader, the token count of
    each request, and for a cache with scales the bounds of its heads; or why the transfer failed."""

    received: Received | None = None
    loaded: list[str] = []
    lost: str = ""
    tokens: dict[str, int] = {}
    bounds: Bounds = {}


class Pickled(msgspec.Struct, frozen=True, array_like=True, tag="pickled"):
    """The offer of a user's sender."""

    content: bytes


def shares_from(plain: Sequence[Sequence[Any]]) -> list[Share]:
    """The shares inside a vLLM worker, without checksums: the engine's owner compares those."""
    found = []
    for layout, value in plain:
        memory: Any = msgspec.convert(value, Handle | Mark | Pickled)
        found.append(Share(layout, NOTHING, cloudpickle.loads(memory.content) if type(memory) is Pickled else memory))
    return found


def route_from(transport: str | bytes, meeting: dict[str, Any] | None) -> Route:
    """The route of a version inside a vLLM worker."""
    known: Transport = TRANSPORTS[transport] if isinstance(transport, str) else cloudpickle.loads(transport)
    return Route(known, msgspec.convert(meeting, MeetingPlace | None))


NOTHING = Summed(b"", b"")


def _landed(content: np.ndarray) -> SharedMemory:
    memory = SharedMemory(content.nbytes, torch.device("cpu"))
    memory.bytes.numpy()[:] = content
    return memory


def _plain(memory: Any) -> Any:
    """Memory as its handle, a mark as it is, anything else pickled."""
    handle = memory.handle if isinstance(memory, SharedMemory) else memory
    known = handle if isinstance(handle, Handle | Mark) else Pickled(pickled(memory))
    return msgspec.to_builtins(known, builtin_types=(bytes,))
