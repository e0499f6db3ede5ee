"""The routers of a mixture of experts in transformers: what they choose, or what they are given. Knows no sampling.

    routers = Routers(network)
    with routers.recording() as made:
        network(input_ids=ids_NS)
    made.of(ids_NS.shape)                        # [N, S, L, K]
    with routers.replaying(given_NSLK):          # backward passes included, since layers may be recomputed there
        network(input_ids=ids_NS)

In transformers 5.19 a router returns logits, the weights of the chosen experts, and the experts, of each token. A hook
replaces the last two.

Legend: N samples, S positions, T = N S tokens, L layers with experts, K experts chosen, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ops.packing import pack
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Microbatch
from stages.backends.interface import part
from stages.backends.model.padding import pad_around
from stages.backends.model.routes import Disagreement, numbered, table
from stages.backends.torch.rows import apart


def _softmax(router: Any, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    """Qwen3MoeTopKRouter."""
    weights_TK = torch.softmax(logits_TE, dtype=torch.float32, dim=-1).gather(1, chosen_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.to(logits_TE.dtype)


def _sigmoid(router: Any, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    """DeepseekV3TopkRouter, and those that are like it."""
    weights_TK = logits_TE.sigmoid().gather(1, chosen_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * router.routed_scaling_factor


_WEIGHTS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Qwen3MoeTopKRouter": _softmax,
    "Glm4MoeTopkRouter": _sigmoid,
    "DeepseekV3TopkRouter": _sigmoid,
    "NemotronHTopkRouter": _sigmoid,
}


class ChosenExperts:
    """The experts that the routers chose in one pass."""

    def __init__(self, layers: int) -> None:
        self.layers: list[torch.Tensor | None] = [None] * layers

    def of(self, shape: tuple[int, ...]) -> torch.Tensor:
        """[N, S, L, K] of a pass over [N, S] positions."""
        made = [chosen for chosen in self.layers if chosen is not None]
        return torch.stack(made, dim=1).unflatten(0, shape)


class Routes:
    """The experts of samples that are decoded token by token: those of their distinct, left-padded prompts, then those
    of each token that the network gets. `prompt_of` is each sample's prompt."""

    def __init__(
        self, experts: ChosenExperts, prompts: Sequence[torch.Tensor], prompt_of: Sequence[int], max_tokens: int
    ) -> None:
        width = max(len(prompt) for prompt in prompts)
        experts_BPLK = experts.of((len(prompts), width)).to(torch.int16).cpu()
        self._prompts = [row[width - len(prompt) :] for row, prompt in zip(experts_BPLK, prompts)]
        self._prompt_of = prompt_of
        self._responses_NT = experts_BPLK.new_zeros(len(prompt_of), max_tokens, *experts_BPLK.shape[2:])

    def add(self, rows_B: torch.Tensor, t: int, experts: ChosenExperts) -> None:
        """Add the experts of token `t` of these samples."""
        self._responses_NT[rows_B.cpu(), t] = experts.of((len(rows_B), 1))[:, 0].to(torch.int16).cpu()

    def of(self, samples: Sequence[int], lengths: Sequence[int]) -> Ragged:
        """The field of these samples, whose responses have these lengths."""
        return Ragged.of(
            [
                torch.cat([self._prompts[self._prompt_of[n]], self._responses_NT[n, : length - 1]]).flatten()
                for n, length in zip(samples, lengths)
            ]
        )


class Routers:
    """The routers of a network, from the first layer to the last; it has some (stages.routes.mixture_problems)."""

    def __init__(self, network: PreTrainedModel) -> None:
        found = [module for module in network.modules() if type(module).__name__ in _WEIGHTS]
        self.network = network
        self.layers, self.chosen = len(found), int(found[0].top_k)  # type: ignore[arg-type]
        self.disagreement = Disagreement()
        self._recorded: ChosenExperts | None = None
        self._given_TLK: torch.Tensor | None = None
        for layer, router in enumerate(found):
            router.register_forward_hook(partial(self._hook, layer))

    @contextmanager
    def recording(self) -> Iterator[ChosenExperts]:
        """Inside this context, one pass leaves the experts of its tokens."""
        self._recorded = ChosenExperts(self.layers)
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def replaying(self, given_NSLK: torch.Tensor) -> Iterator[None]:
        """Inside this context, tokens have the given experts; those whose experts are not known, their own."""
        self._given_TLK = given_NSLK.flatten(0, 1)
        try:
            yield
        finally:
            self._given_TLK = None

    def _hook(self, layer: int, router: nn.Module, given: Any, made: Any) -> Any:
        logits_TE, _, own_TK = made
        if self._recorded is not None:
            self._recorded.layers[layer] = own_TK
        if self._given_TLK is None:
            return made
        chosen_TK = self.disagreement.choice(own_TK, self._given_TLK[:, layer])
        return logits_TE, _WEIGHTS[type(router).__name__](router, logits_TE, chosen_TK), chosen_TK


def along(
    routers: Routers | None,
    routes: Ragged | None,
    prompt_ids: Ragged,
    response_ids: Ragged,
    microbatch: Microbatch,
    *,
    packed: bool,
) -> AbstractContextManager[None]:
    """A context in which the tokens of a microbatch have their experts, if the batch has `routes`. Its pass is that of
    `stages.backends.torch.score.predict`."""
    if routers is None or routes is None:
        return nullcontext()
    lengths = prompt_ids.lengths, response_ids.lengths
    prompts, responses = numbered(*lengths)
    if packed and apart(routers.network):
        numbers_NS = pack(prompts.rows(), responses.rows()).ids_1S
    else:
        numbers_NS = pad_around(prompts, responses, 0, microbatch.prompt, microbatch.response)[:, :-1]
    given = table(part(routes, microbatch.samples), *lengths, layers=routers.layers, chosen=routers.chosen)
    return routers.replaying(given[numbers_NS].to(routers.network.device))
