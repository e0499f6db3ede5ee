"""What `collective_rpc` can call in vLLM's workers. `Loader` becomes a part of vLLM's worker class, one a rank; with it
comes the weight transfer engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from stages.backends.device import bytes_in_use
from stages.backends.vllm import transfer
from stages.backends.vllm.api import WeightTransferEngineFactory
from stages.backends.vllm.choice import logprobs_of, tokens_of

WeightTransferEngineFactory.register_engine(transfer.NAME, transfer.__name__, transfer.Transfer.__name__)


class Loader:
    """The worker's own names are those that do not begin with "sluice"."""

    device: torch.device
    weight_transfer_engine: transfer.Transfer
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def sluice_bytes_in_use(self) -> int:
        """Of this rank's GPU, by all processes."""
        return bytes_in_use(self.device)

    def sluice_logprobs(self, lengths: dict[str, int], others: list[str]) -> list[bytes]:
        """Of the tokens of requests that have ended, float32. `others` are requests of which nobody wants them."""
        return logprobs_of(lengths, others)

    def sluice_differing(self) -> list[str]:
        """`Transfer.differing`."""
        return self.weight_transfer_engine.differing()

    def sluice_receive(self, offered: dict[str, Any], names: list[str]) -> bytes:
        """A version, by the three calls that vLLM has for it, in one, since each takes a way to every rank and back.
        Returns `weights.Answer`, encoded. None of these requests runs meanwhile, so their tokens are those that the
        old weights computed."""
        self.start_weight_update()
        self.update_weights(offered)
        self.finish_weight_update()
        return msgspec.msgpack.encode(self.weight_transfer_engine.answer(tokens_of(names)))
