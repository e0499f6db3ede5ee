"""Routers of a mixture of experts: which experts a token has, and with which weights. Knows tensors, no names.

Legend: T tokens, E experts, G divisions of the experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn.functional import linear

from stages.backends.model.decoder import Sparse

_SMALL = 1e-20  # added to a sum of weights, as transformers does


class Router(TopKRouter):
    """A router without Transformer Engine, which Megatron-core's gating requires."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Returns [..., experts]."""
        return linear(input, self.weight)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Does nothing, since no expert has a bias. The base class would compile a function to find that out."""


class SigmoidRouter(Router):
    """DeepSeek-V3's router (arXiv 2412.19437, equations 13 to 16), as transformers computes it, in float32.

    `expert_bias` decides which experts are chosen, not their weights. It is loaded, served and saved, and stays as it
    is: Megatron-core would move it towards experts that get few tokens.
    """

    expert_bias: torch.Tensor

    def __init__(self, mixture: Sparse, config: TransformerConfig, **given: Any) -> None:
        super().__init__(config, **given)
        self.mixture = mixture
        del self.expert_bias  # None in the base class
        self.register_buffer("expert_bias", torch.zeros(mixture.experts, device=self.weight.device))

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Returns [..., experts]."""
        return linear(input.float(), self.weight.float())

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and choice of each token's experts, [T, E] both."""
        mixture = self.mixture
        scores_TE = logits.view(-1, mixture.experts).sigmoid()
        with torch.no_grad():
            wanted_TE = scores_TE + self.expert_bias
            if mixture.kept < mixture.divisions:
                wanted_TGE = wanted_TE.unflatten(-1, (mixture.divisions, -1))
                best_TG = wanted_TGE.topk(2, dim=-1).values.sum(-1)
                kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
                kept_TG.scatter_(1, best_TG.topk(mixture.kept, dim=-1).indices, True)
                wanted_TE = wanted_TGE.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)
            chosen = wanted_TE.topk(mixture.chosen, dim=-1).indices
        weights = scores_TE.gather(1, chosen)
        if mixture.renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + _SMALL)
        weights_TE = torch.zeros_like(scores_TE).scatter(1, chosen, weights * mixture.scale)
        chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen, True)
        return weights_TE, chosen_TE
