"""What `collective_rpc` can call in vLLM's workers. `Loader` becomes a part of vLLM's worker class, one a rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from ops.refit.memory import Handle
from ops.refit.share import Share, layout_of
from ops.refit.sums import Summed
from stages.backends.decoder import Decoder
from stages.backends.device import bytes_in_use
from stages.backends.receive import Receiver
from stages.backends.vllm.choice import logprobs_of, tokens_of
from stages.backends.vllm.storage import Storage, differing


class Loader:
    """The worker's own names are those that do not begin with "sluice"."""

    device: torch.device
    rank: int
    vllm_config: Any
    reload_weights: Any
    get_model: Any
    sluice_storage: Storage | None = None
    sluice_receiver: Receiver | None = None

    def sluice_bytes_in_use(self) -> int:
        """Of this rank's GPU, by all processes."""
        return bytes_in_use(self.device)

    def sluice_logprobs(self, lengths: dict[str, int], others: list[str]) -> list[bytes]:
        """Of the tokens of requests that have ended, float32. `others` are requests of which nobody wants them."""
        return logprobs_of(lengths, others)

    def sluice_differing(self) -> list[str]:
        """Parameters that are not where a refit would write them; of a model without a table, none."""
        config, decoder = self.vllm_config, self._decoder()
        if decoder is None:
            return []
        return differing(
            self.get_model(), decoder, self.rank, config.parallel_config.tensor_parallel_size,
            dtype=config.model_config.dtype, device=self.device, folder=Path(config.model_config.model),
        )  # fmt: skip

    def sluice_receive(
        self, told: dict[str, Any], names: list[str]
    ) -> tuple[list[bytes], dict[str, float], list[str], dict[str, int]]:
        """Bring this rank's part of a version (`vllm.weights.Told`) from the trainer's memory.

        Returns the checksums of all boxes, the record of how they came, the tensors that went through vLLM's loader,
        and how many tokens each of these requests has: none of them runs meanwhile, so these are the tokens that the
        old weights computed.
        """
        nothing = Summed(b"", b"")
        shares = [Share(layout, nothing, msgspec.convert(memory, Handle)) for layout, memory in told["shares"]]
        if self.sluice_receiver is None:
            self._prepare(shares, told)
        assert self.sluice_receiver is not None and self.sluice_storage is not None
        received = self.sluice_receiver.receive(shares)
        begun_s = time.perf_counter()
        self.sluice_storage.finish(self.reload_weights)
        record = received.record | {
            "finish_ms": 1e3 * (time.perf_counter() - begun_s),
            "through_loader": float(len(self.sluice_storage.loaded)),
        }
        summed = [received.summed.boxes, received.summed.sums]
        return summed, record, self.sluice_storage.loaded, tokens_of(names)

    def _prepare(self, shares: list[Share], told: dict[str, Any]) -> None:
        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        storage = Storage(
            self.get_model(), self._decoder(), ranks, by_loader=told["by_loader"],
            offered=layout_of(shares).tensors, dtype=self.vllm_config.model_config.dtype, device=self.device,
        )  # fmt: skip
        own = [storage.places(rank) for rank in range(ranks)]
        receiver = told["replica"] * ranks + self.rank
        self.sluice_receiver = Receiver(storage.tensors, own * told["replicas"], receiver, storage.held)
        self.sluice_storage = storage

    def _decoder(self) -> Decoder | None:
        """The model, where there is a table for it."""
        config = self.vllm_config.model_config.hf_config.to_dict()
        return Decoder.of(config, "") if Decoder.knows(config) else None
