"""Loads weights inside vLLM. `Loader` becomes a part of vLLM's worker class, one of which runs on each rank."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load_file

from stages.backends.torch.weights import weight_hash
from stages.backends.vllm.choice import tokens_of
from stages.backends.vllm.versions import ParallelLMHead


class Loader:
    """What `collective_rpc` can call besides the worker's own methods."""

    reload_weights: Any  # of the worker class, as is
    get_model: Any

    def sluice_load(self, path: str, names: list[str]) -> tuple[str, dict[str, int]]:
        """Load a safetensors file with the names of a Hugging Face folder, each rank its share.

        Returns the hash of what was read, and how many tokens each of these requests has: none of them runs meanwhile,
        so these are the tokens that the old weights computed.
        """
        weights = load_file(path)
        sha256 = weight_hash(weights)
        self.reload_weights(weights_iterator=iter(weights.items()))
        for module in self.get_model().modules():
            if isinstance(module, ParallelLMHead):  # a tied one is not loaded, and on the CPU keeps a packed copy
                module.quant_method.process_weights_after_loading(module)
        return sha256, tokens_of(names)
