"""One rank's receiving end of a refit, as a vLLM weight transfer engine: reads what the trainer ranks offer and writes
it into the parameters. vLLM creates one in each worker, under the name `NAME`.

vLLM calls init once per engine, and start, update and finish for each version; then `answer` returns the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ops.comm.stateless_group import GroupError
from ops.refit.ledger import Ledger
from ops.refit.share import Share, layout_of
from stages.backends.model.cache_bounds import Bounds, bounds_of
from stages.backends.model.families import reader_of
from stages.backends.refit.target import Received, Target
from stages.backends.vllm import cache_scales
from stages.backends.vllm.api import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    attention_layers,
    is_8_bit,
    load_anew,
)
from stages.backends.vllm.storage import Storage, differing, wrong_layers
from stages.backends.vllm.table import ParameterTable
from stages.backends.vllm.weights import RankAnswer, route_from, shares_from

NAME = "sluice"


@dataclass
class Joined(WeightTransferInitInfo):
    """This engine's index among all engines, and the parameters that vLLM's loader must handle."""

    replica: int
    replicas: int
    by_loader: list[str] = field(default_factory=list)


@dataclass
class Offered(WeightTransferUpdateInfo):
    """`VersionShares.plain`: the shares of all trainer ranks, each a layout and a reference to memory; the transport,
    by name or pickled; and, if both sides carry, the meeting."""

    shares: list[Any]
    version: int
    transport: str | bytes
    meeting: dict[str, Any] | None


class Transfer(WeightTransferEngine[Joined, Offered]):
    """The engine of one rank."""

    init_info_cls, update_info_cls = Joined, Offered
    _joined: Joined
    _storage: Storage | None = None
    _target: Target | None = None
    _received: Received | None = None
    _parts: Callable[[str], torch.Tensor | None] | None = None  # reads what was received, if the cache has scales
    _bounds: Bounds = {}
    _lost = ""

    def init_transfer_engine(self, init_info: Joined) -> None:
        """Record the place; memory is allocated with the first version."""
        self._joined, self._target = init_info, None

    @property
    def joined(self) -> Joined:
        """The place."""
        return self._joined

    def start_weight_update(self) -> None:
        """Nothing to do before a version."""
        self._received, self._lost = None, ""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a version. Complete on every device on return."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Offered) -> None:
        """Receive a version."""
        route = route_from(update_info.transport, update_info.meeting)
        shares = shares_from(update_info.shares)
        if self._target is None:
            self._prepare(shares, by_loader=route.transport.by_loader)
        assert self._target is not None
        try:
            self._received = self._target.receive(shares, update_info.version, route)
        except GroupError as error:  # vLLM would exit on it
            self._lost = str(error)

    def finish_weight_update(self) -> None:
        """Let vLLM post-process the weights."""
        if self._lost:
            return
        assert self._storage is not None and self._received is not None
        begun_s = time.perf_counter()
        if self._parts is not None:
            self._bounds = bounds_of(self._parts, self._storage.tensors, amplitude=self._amplitude)
            self._received.record["bound_ms"] = 1e3 * (time.perf_counter() - begun_s)
            begun_s = time.perf_counter()
        self._storage.finish(self._load)
        self._received.record["finish_ms"] = 1e3 * (time.perf_counter() - begun_s)
        self._received.record["through_loader"] = float(len(self._storage.loaded))
        self._received.record["loader_bytes"] = float(self._storage.loaded_bytes)

    def answer(self, tokens: dict[str, int]) -> RankAnswer:
        """The result of the last version."""
        if self._lost:
            return RankAnswer(lost=self._lost)
        assert self._storage is not None
        return RankAnswer(self._received, self._storage.loaded, tokens=tokens, bounds=self._bounds)

    def layers(self) -> dict[int, Any]:
        """The attention layers, if their cache is one of 8-bit floats; otherwise none."""
        if not is_8_bit(self.vllm_config):
            return {}
        return cache_scales.cached_layers(attention_layers(self.model))

    def folder_bounds(self) -> Bounds:
        """The bounds of this rank's share of the layers, from the model's folder."""
        parallel, factor = self.parallel_config, cache_scales.amplitude(self.model)
        ranks, folder = parallel.tensor_parallel_size, Path(self.model_config.model)
        return cache_scales.folder_bounds(folder, parallel.rank, ranks, factor, self.device)

    def differing(self) -> list[str]:
        """Parameters that are not where a refit would write them; empty for a model without a table."""
        if (table := self._table()) is None:
            return []
        folder = Path(self.model_config.model)
        return differing(self.model, table, self.parallel_config.rank, device=self.device, folder=folder)

    def refused(self) -> str:
        """Why vLLM's choice of quantized layers is wrong; empty if it is right, or if nothing is quantized."""
        return wrong_layers(self.model) if self.model_config.quantization is not None else ""

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Unused: a trainer publishes its part (ops/refit/share.py). vLLM 0.26 requires the method."""

    def shutdown(self) -> None:
        """Release the trainer's memory."""
        if self._target is not None:
            self._target.close()

    def _prepare(self, shares: list[Share], *, by_loader: bool) -> None:
        """Find the parameters; `by_loader` sends all of them through vLLM's own loader."""
        ranks, joined, ledger = self.parallel_config.tensor_parallel_size, self._joined, Ledger(self.device)
        with ledger.counting():
            storage = Storage(
                self.model, None if by_loader else self._table(), by_loader=joined.by_loader,
                offered=layout_of(shares).tensors, device=self.device, ledger=ledger,
            )  # fmt: skip
        own = [storage.places(rank) for rank in range(ranks)]
        self._target = Target(
            storage.tensors, own, self.parallel_config.rank, storage.held,
            replica=joined.replica, replicas=joined.replicas, ledger=ledger,
        )  # fmt: skip
        self._storage = storage
        if is_8_bit(self.vllm_config):
            self._parts, self._amplitude = storage.parts(self.parallel_config.rank), cache_scales.amplitude(self.model)

    def _table(self) -> ParameterTable | None:
        """The table of the model's parameters, if there is one."""
        config, dtype = self.model_config.hf_config.to_dict(), self.model_config.dtype
        if quantized := self.model_config.quantization == "fp8":
            config.pop("quantization_config", None)  # otherwise it is a model that has no table
        if (decoder := reader_of(config)) is None:
            return None
        assert isinstance(dtype, torch.dtype)
        ranks = self.parallel_config.tensor_parallel_size
        return ParameterTable(decoder, ranks, dtype, quantized=quantized)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_anew(self.vllm_config, self.model, weights)
