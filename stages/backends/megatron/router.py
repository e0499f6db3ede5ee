"""Routers of a mixture of experts: which experts a token has, and with which weights. Knows tensors, no names.

A router can be given the experts of its tokens (router replay). Megatron-core has that too (moe/router_replay.py), with
one list of routers for the process, of which a caller says whether the next pass is a forward pass or a recomputation.
Here a pass carries its experts, so recomputation, pipelines and several models need no rule, and tokens whose experts
are not known choose.

Legend: T tokens, E experts, K experts chosen, G divisions of the experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn.functional import linear

from stages.backends.model.decoder import Sparse
from stages.backends.model.routes import Disagreement

_SMALL = 1e-20  # added to a sum of weights, as transformers does


class ReplayingRouter(TopKRouter):
    """A router of softmax whose choice can be given. `given_TK` are the experts of the next pass, or None; all routers
    of a network count in one `disagreement`."""

    given_TK: torch.Tensor | None = None
    disagreement: Disagreement

    def choice(self, own_TK: torch.Tensor) -> torch.Tensor:
        """Each token's experts: those given, or its own choice."""
        return own_TK if self.given_TK is None else self.disagreement.choice(own_TK, self.given_TK)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and choice of each token's experts, [T, E] both."""
        if self.given_TK is None:
            return super().routing(logits, padding_mask)
        logits_TE = logits.view(-1, self.config.num_moe_experts)
        chosen_TK = self.choice(logits_TE.detach().topk(self.topk, dim=-1).indices)
        if self.config.moe_router_pre_softmax:
            weights_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, chosen_TK)
        else:
            weights_TK = logits_TE.gather(1, chosen_TK).softmax(-1, dtype=torch.float32)
        return _spread(weights_TK.type_as(logits_TE), chosen_TK, logits_TE)


class Router(ReplayingRouter):
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
            chosen_TK = self.choice(wanted_TE.topk(mixture.chosen, dim=-1).indices)
        weights_TK = scores_TE.gather(1, chosen_TK)
        if mixture.renormalised:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _SMALL)
        return _spread(weights_TK * mixture.scale, chosen_TK, scores_TE)


def _spread(
    weights_TK: torch.Tensor, chosen_TK: torch.Tensor, scores_TE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and choice of all experts, [T, E] both: 0 and False for those that are not chosen."""
    weights_TE = torch.zeros_like(scores_TE).scatter(1, chosen_TK, weights_TK)
    return weights_TE, torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
