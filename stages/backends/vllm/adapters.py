"""One rank's adapters, each under a number of its own: a new version is put beside the others, so requests that run go
on with theirs, and neither they nor the cache notice.

vLLM computes with adapters in its slots (`adapter_slots`), and knows the keys and values of an adapter by its name.
Every rank receives the whole adapter; vLLM takes the part of a tensor-parallel rank.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch

from ops.comm.stateless_group import GroupError
from ops.refit.layout import dense, whole
from ops.refit.ledger import Ledger
from ops.refit.share import layout_of
from stages.backends.model.adapters import PEFT
from stages.backends.refit.target import Received, Target
from stages.backends.vllm.adapter_slots import AdapterSlots
from stages.backends.vllm.transfer import Joined, Offered
from stages.backends.vllm.weights import RankAnswer, route_from, shares_from
from stages.lora import B


class Adapters:
    """The adapters of a vLLM worker, which is the `rank`-th of `ranks`."""

    def __init__(self, model_runner: Any, device: torch.device, rank: int, ranks: int, joined: Joined) -> None:
        self._runner, self._device, self._joined = model_runner, device, joined
        self._rank, self._ranks = rank, ranks
        self._flat = torch.empty(0)  # all matrices A, then all B
        self._first_b = 0
        self._held: dict[str, torch.Tensor] = {}  # views of it
        self._target: Target | None = None
        self._slots: AdapterSlots | None = None

    def receive(
        self, offered: Offered, number: int, lora_rank: int, scaling: float, keep: Collection[int]
    ) -> RankAnswer:
        """Receive an adapter and add it under this number, after all others but those to `keep` were removed."""
        shares, route = shares_from(offered.shares), route_from(offered.transport, offered.meeting)
        if self._target is None:
            self._target = self._prepared(layout_of(shares).tensors)
        try:
            received = self._target.receive(shares, offered.version, route)
        except GroupError as error:  # vLLM would exit on it
            return RankAnswer(lost=str(error))
        begun_s = time.perf_counter()
        if self._slots is None:
            self._slots = AdapterSlots(self._runner, self._views, lora_rank, self._device)
        self._slots.forget(keep)
        by_vllm = self._slots.add(number, self._scaled(scaling))
        finish_ms = 1e3 * (time.perf_counter() - begun_s)
        more = {"finish_ms": finish_ms, "moved_by_vllm": float(by_vllm), "loader_bytes": 0.0}
        return RankAnswer(Received(received.summed, received.record | more))

    def close(self) -> None:
        """Release the trainer's memory."""
        if self._target is not None:
            self._target.close()

    def _scaled(self, scaling: float) -> torch.Tensor:
        """A copy of what was received, with the scaling in B."""
        flat = self._flat.clone()
        flat[self._first_b :].mul_(scaling)
        return flat

    def _views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The matrices in such a copy, by PEFT's names."""
        parts = flat.split([tensor.numel() for tensor in self._held.values()])
        return {PEFT + name: part.view(held.shape) for (name, held), part in zip(self._held.items(), parts)}

    def _prepared(self, tensors: Mapping[str, Any]) -> Target:
        """Allocate what an adapter is received in."""
        ledger, (dtype,) = Ledger(self._device), {tensor.dtype for tensor in tensors.values()}
        names = sorted(tensors, key=lambda name: (name.endswith(B), name))
        sizes = [prod(tensors[name].shape) for name in names]
        self._first_b = sum(size for name, size in zip(names, sizes) if not name.endswith(B))
        with ledger.counting():
            self._flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=self._device)
        parts = self._flat.split(sizes)
        self._held = {name: part.view(tensors[name].shape) for name, part in zip(names, parts)}
        places = [dense(name, whole(tensor.shape), tensor.item_bytes, name) for name, tensor in tensors.items()]
        return Target(
            tensors, [places] * self._ranks, self._rank, self._held,
            replica=self._joined.replica, replicas=self._joined.replicas, ledger=ledger,
        )  # fmt: skip
