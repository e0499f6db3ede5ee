"""Methods that `collective_rpc` calls in vLLM's workers. vLLM mixes `Loader` into its worker class, one per rank;
importing it registers the weight transfer engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from stages.backends.device import bytes_in_use
from stages.backends.model.cache_bounds import Bounds
from stages.backends.vllm import adapters, cache_scales, speculation, transfer, vision
from stages.backends.vllm.api import WeightTransferEngineFactory, has_second_runner
from stages.backends.vllm.choice import logprobs_of, passes_of, tokens_of

WeightTransferEngineFactory.register_engine(transfer.NAME, transfer.__name__, transfer.Transfer.__name__)
vision.install()
if has_second_runner():
    from stages.backends.vllm import sampler

    sampler.install()


class Loader:
    """Mixin for vLLM's worker. Names that do not begin with "sluice" are the worker's own."""

    device: torch.device
    model_runner: Any
    weight_transfer_engine: transfer.Transfer
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    parallel_config: Any
    _adapters: adapters.Adapters | None = None

    def sluice_bytes_in_use(self) -> int:
        """Bytes in use on this rank's GPU, by all processes."""
        return bytes_in_use(self.device)

    def sluice_verify(self) -> None:
        """Verify drafts by the rule that chooses tokens without drafts."""
        speculation.install(self.model_runner, self.device)

    def sluice_logprobs(self, lengths: dict[str, int], others: list[str]) -> tuple[list[bytes], list[int]]:
        """Float32 logprobs of finished requests' tokens, and the passes of each request (`choice.passes_of`). `others`
        are requests whose logprobs are not needed."""
        table = self._table()
        rows = table.take(lengths, others) if table else logprobs_of(lengths, others)
        return rows, passes_of(list(lengths))

    def sluice_differing(self) -> list[str]:
        """`Transfer.differing`."""
        return self.weight_transfer_engine.differing()

    def sluice_refused(self) -> str:
        """`Transfer.refused`."""
        return self.weight_transfer_engine.refused()

    def sluice_not_in_place(self) -> str:
        """`cache_scales.not_in_place`."""
        return cache_scales.not_in_place(self.weight_transfer_engine.layers())

    def sluice_folder_bounds(self) -> bytes:
        """`Transfer.folder_bounds`, encoded."""
        return msgspec.msgpack.encode(self.weight_transfer_engine.folder_bounds())

    def sluice_scale_cache(self, scales: bytes) -> None:
        """Set the scales of the cache, encoded, which must be empty: what it holds was written with others."""
        cache_scales.install(self.weight_transfer_engine.layers(), msgspec.msgpack.decode(scales, type=Bounds))

    def sluice_receive(self, offered: dict[str, Any], names: list[str]) -> bytes:
        """Receive a version: vLLM's three calls in one, since each would be a round trip to all ranks. Returns
        `weights.RankAnswer`, encoded. No request runs meanwhile, so all their tokens are from the old weights."""
        self.start_weight_update()
        self.update_weights(offered)
        self.finish_weight_update()
        table = self._table()
        counts = table.counts(names) if table else tokens_of(names)
        return msgspec.msgpack.encode(self.weight_transfer_engine.answer(counts))

    def sluice_receive_adapter(
        self, offered: dict[str, Any], number: int, lora_rank: int, scaling: float, keep: list[int]
    ) -> bytes:
        """`Adapters.receive`, encoded. Running requests do not notice."""
        if self._adapters is None:
            parallel, joined = self.parallel_config, self.weight_transfer_engine.joined
            self._adapters = adapters.Adapters(
                self.model_runner, self.device, parallel.rank, parallel.tensor_parallel_size, joined
            )
        received = self._adapters.receive(transfer.Offered(**offered), number, lora_rank, scaling, keep)
        return msgspec.msgpack.encode(received)

    def _table(self) -> Any:
        return sampler.table_of(self.model_runner) if has_second_runner() else None
