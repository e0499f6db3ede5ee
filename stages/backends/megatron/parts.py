"""Maps the ranks of a worker group to parts of a model. Arithmetic only: no tensors, no processes.

    part = Part.of(rank=5, layout=RankLayout(data=2, tensor=2, pipeline=2), experts=2, expert_tensors=1)
    stage_layers(61, 16)[part.stage]                 # the layers of a pipeline stage

Ranks count up in Megatron-core's order. Inside a pipeline stage, the experts are divided over the same ranks as
everything else, but in their own way: first each expert over `expert_tensors` ranks, then all experts over `experts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from pipeline.declare.ranks import RankLayout


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a model that a rank holds: its index and the number of ranks in each kind of parallelism.

    tensor, stage             of everything but the experts; `stage` also of the experts
    expert, expert_tensor     of the experts: which of them, and which part of each
    fused_norms               whether norms are inside linear layers (Transformer Engine)
    grouped_experts           whether one layer multiplies the tokens of all experts (Transformer Engine)
    """

    tensor: int = 0
    tensors: int = 1
    stage: int = 0
    stages: int = 1
    expert: int = 0
    experts: int = 1
    expert_tensor: int = 0
    expert_tensors: int = 1
    fused_norms: bool = False
    grouped_experts: bool = False

    @staticmethod
    def of(rank: int, layout: RankLayout, experts: int, expert_tensors: int) -> Part:
        """The part that a rank holds, in Megatron-core's own layers."""
        stage, within = divmod(rank, stage_ranks(layout))
        return Part(
            tensor=within % layout.tensor,
            tensors=layout.tensor,
            stage=stage,
            stages=layout.pipeline,
            expert=within // expert_tensors % experts,
            experts=experts,
            expert_tensor=within % expert_tensors,
            expert_tensors=expert_tensors,
        )

    def in_layers_of(self, other: Part) -> Part:
        """This part of the model in the kinds of layers that hold the other part."""
        return replace(self, fused_norms=other.fused_norms, grouped_experts=other.grouped_experts)

    @property
    def plain(self) -> Part:
        """This part in Megatron-core's own layers."""
        return self.in_layers_of(Part())


def stage_ranks(layout: RankLayout) -> int:
    """Number of ranks in a pipeline stage."""
    return layout.tensor * layout.context * layout.data


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each pipeline stage: contiguous, and in no stage more than one layer above another.

    If they do not divide evenly, the last stage has fewer, since it also computes logits; then the first stages, since
    they keep the activations of more microbatches (1F1B).
    """
    counts = [-(-layers // stages)] * stages
    for stage in [stages - 1, *range(stages - 1)][: -layers % stages]:
        counts[stage] -= 1
    return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts))]
