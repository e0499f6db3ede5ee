"""Loads weights inside vLLM. `Loader` becomes a part of vLLM's worker class, one of which runs on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from stages.backends.device import bytes_in_use
from stages.backends.snapshot import Handle, opened
from stages.backends.torch.weights import Hashes
from stages.backends.vllm.choice import logprobs_of, tokens_of
from stages.backends.vllm.versions import ParallelLMHead


class Loader:
    """What `collective_rpc` can call besides the worker's own methods."""

    device: torch.device  # these are the worker class's
    reload_weights: Any
    get_model: Any

    def sluice_bytes_in_use(self) -> int:
        """Of this rank's GPU, by all processes."""
        return bytes_in_use(self.device)

    def sluice_logprobs(self, lengths: dict[str, int], others: list[str]) -> list[bytes]:
        """Of the tokens of requests that have ended, float32. `others` are requests of which nobody wants them."""
        return logprobs_of(lengths, others)

    def sluice_load(self, told: dict[str, Any], names: list[str]) -> tuple[str, dict[str, int]]:
        """Load weights with the names of a Hugging Face folder, each rank its share: from a safetensors file (`path`),
        or from the trainer's memory on a GPU (`handle`).

        Returns the hash of what was read, and how many tokens each of these requests has: none of them runs meanwhile,
        so these are the tokens that the old weights computed.
        """
        in_place = "handle" in told
        weights = opened(msgspec.convert(told["handle"], Handle), self.device) if in_place else load_file(told["path"])
        hashes = Hashes()

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights.items():
                own = tensor.clone() if in_place else tensor  # what is hashed is what is loaded
                hashes.add(name, own)
                yield name, own

        self.reload_weights(weights_iterator=read())
        for module in self.get_model().modules():
            if isinstance(module, ParallelLMHead):  # a tied one is not loaded, and on the CPU keeps a packed copy
                module.quant_method.process_weights_after_loading(module)
        if in_place:
            torch.cuda.synchronize(self.device)  # its owner may change it as soon as this returns
        return hashes.together(), tokens_of(names)
