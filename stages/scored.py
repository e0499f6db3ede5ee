"""The columns that a loss is computed from. Loads no torch: a description of a loss may name them anywhere.

Legend: N samples, T tokens of the longest response.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Scored:
    """One microbatch: log-probabilities of its response tokens in nat, padded to [N, T].

    logprobs_NT          under the policy in training, with a gradient
    old_logprobs_NT      under the policy before the step's first update: the denominator of the ratio
    rollout_logprobs_NT  from the sampler; None unless the loss has a correction
    advantage_N          one per sample
    mask_NT              bool, True for a token, False for padding
    ref_logprobs_NT      under the frozen model; None unless the graph has RefLogprobs
    entropy_NT           of the policy's next token, or None; with a gradient if the loss has an entropy bonus
    weight_NT            what the correction multiplies each token's loss by, 0 or more; None without a correction
    """

    logprobs_NT: torch.Tensor
    old_logprobs_NT: torch.Tensor
    rollout_logprobs_NT: torch.Tensor | None
    advantage_N: torch.Tensor
    mask_NT: torch.Tensor
    ref_logprobs_NT: torch.Tensor | None = None
    entropy_NT: torch.Tensor | None = None
    weight_NT: torch.Tensor | None = None

    @property
    def advantage_NT(self) -> torch.Tensor:
        """[N, T]: each token's advantage times its weight, 0 in padding. A loss that multiplies by it is corrected."""
        advantage_NT = self.advantage_N[:, None].expand_as(self.mask_NT)
        if self.weight_NT is not None:
            advantage_NT = advantage_NT * self.weight_NT
        return advantage_NT.masked_fill(~self.mask_NT, 0.0)

    @property
    def ratio_NT(self) -> torch.Tensor:
        """[N, T]: exp(logprobs - old_logprobs), with a gradient; 1 in padding."""
        return (self.logprobs_NT - self.old_logprobs_NT).masked_fill(~self.mask_NT, 0.0).exp()

    def without_padding(self) -> Scored:
        """The same with 0 wherever there is no token, so that no formula can pick up what padding holds."""
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_NT")}
        padding_NT = ~columns.pop("mask_NT")
        blank = {name: column.masked_fill(padding_NT, 0.0) for name, column in columns.items() if column is not None}
        return replace(self, **blank)
