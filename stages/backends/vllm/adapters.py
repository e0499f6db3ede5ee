"""One rank's adapters, each under a number of its own: a new version is put beside the others, so requests that run go
on with theirs, and neither they nor the cache notice.

vLLM moves an adapter to one of its slots when a step needs it, and knows the keys and values of an adapter by its name.
Every rank receives the whole adapter; vLLM takes the part of a tensor-parallel rank.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ops.comm.stateless_group import GroupError
from ops.refit.layout import dense, whole
from ops.refit.ledger import Ledger
from ops.refit.share import layout_of
from stages.backends.model.adapters import PEFT
from stages.backends.refit.target import Received, Target
from stages.backends.vllm.api import adapters_of, add_adapter, remove_adapter
from stages.backends.vllm.transfer import Joined, Offered
from stages.backends.vllm.weights import RankAnswer, route_from, shares_from


class Adapters:
    """The adapters of a vLLM worker, which is the `rank`-th of `ranks`."""

    def __init__(self, model_runner: Any, device: torch.device, rank: int, ranks: int, joined: Joined) -> None:
        self._runner, self._device, self._joined = model_runner, device, joined
        self._rank, self._ranks = rank, ranks
        self._held: dict[str, torch.Tensor] = {}
        self._target: Target | None = None

    def receive(self, offered: Offered, number: int, lora: Mapping[str, Any], keep: Collection[int]) -> RankAnswer:
        """Receive an adapter and add it under this number, after all others but those to `keep` were removed. `lora` is
        its configuration, as PEFT writes it."""
        shares, route = shares_from(offered.shares), route_from(offered.transport, offered.meeting)
        if self._target is None:
            self._target = self._prepared(layout_of(shares).tensors)
        try:
            received = self._target.receive(shares, offered.version, route)
        except GroupError as error:  # vLLM would exit on it
            return RankAnswer(lost=str(error))
        begun_s = time.perf_counter()
        for old in adapters_of(self._runner) - {*keep}:
            remove_adapter(self._runner, old)
        tensors = {PEFT + name: tensor.clone() for name, tensor in self._held.items()}  # vLLM scales them in place
        add_adapter(self._runner, number, tensors, lora, self._device)
        received.record["finish_ms"] = 1e3 * (time.perf_counter() - begun_s)
        return RankAnswer(Received(received.summed, received.record | {"loader_bytes": 0.0}))

    def close(self) -> None:
        """Release the trainer's memory."""
        if self._target is not None:
            self._target.close()

    def _prepared(self, tensors: Mapping[str, Any]) -> Target:
        """Allocate what an adapter is received in."""
        ledger = Ledger(self._device)
        with ledger.counting():
            self._held = {
                name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=self._device)
                for name, tensor in tensors.items()
            }
        places = [dense(name, whole(tensor.shape), tensor.item_bytes, name) for name, tensor in tensors.items()]
        return Target(
            tensors, [places] * self._ranks, self._rank, self._held,
            replica=self._joined.replica, replicas=self._joined.replicas, ledger=ledger,
        )  # fmt: skip
