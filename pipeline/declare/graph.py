"""What the user writes: `Graph`, `Model`, `WorkerGroup`, `Schedule`. Frozen descriptions; nothing runs here.

    Graph(name="grpo",
          source=Prompts("train.jsonl", batch=32),
          stages=(Rollout(policy, on=sampler, samples_per_prompt=8), Reward(exact_match), ...),
          schedule=Schedule(steps=100))

Edges come from field names. `pipeline.plan` turns a Graph into a Plan, or into every problem that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.declare.group import HOST, WorkerGroup, _Located
from pipeline.declare.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How far the graph runs, and how far it may run ahead of itself.

    steps             batches to train on
    max_staleness     versions that any trained token may be older than the weights it trains; 0 is synchronous
    pipeline_depth    batches that rollout may be ahead of train; None is max_staleness. Fewer leave room for slow
                      samples
    on_stale          "wait": batches are fixed as they are admitted and trained in turn, so age is bounded and nothing
                      is lost. "drop": a batch is what is ready first; samples that would be too old are dropped,
                      cancelled where they still run, counted, and replaced
    refit             "drain": new weights wait until the sequences that are being sampled have ended. "in_flight": they
                      are swapped between two tokens, and every token says which version sampled it
    capacity          groups that may lie in the data plane; None means (max_staleness + 2) batches, so that a slow
                      reader that trains nothing may lag one behind
    checkpoint_every  steps between checkpoints; 0 writes only the one at the end
    keep_groups       groups of each step whose texts are kept in the run directory: the first, the extremes of reward
    seed              of everything random in the run
    """

    steps: int
    max_staleness: int = 0
    pipeline_depth: int | None = None
    on_stale: Literal["wait", "drop"] = "wait"
    refit: Literal["drain", "in_flight"] = "drain"
    capacity: int | None = None
    checkpoint_every: int = 0
    keep_groups: int = 4
    seed: int = 0

    @property
    def ahead(self) -> int:
        """Batches that rollout may be ahead of train."""
        return self.max_staleness if self.pipeline_depth is None else min(self.pipeline_depth, self.max_staleness)


@dataclass(frozen=True, kw_only=True)
class Graph(_Located):
    """One training step, declared. `source` makes the prompts; `stages` are in any order."""

    name: str
    source: Stage
    stages: Sequence[Stage]
    schedule: Schedule
    host: WorkerGroup = field(default_factory=lambda: WorkerGroup(HOST))

    def all_stages(self) -> tuple[Stage, ...]:
        """The source and the stages."""
        return (self.source, *self.stages)

    @property
    def group_size(self) -> int:
        """Samples a prompt: what the one stage that makes samples says, 1 where none does."""
        sizes = [stage.group_size for stage in self.all_stages() if stage.group_size]
        return sizes[0] if sizes and isinstance(sizes[0], int) else 1

    @property
    def batch(self) -> int:
        """Groups a step, as the source says; 1 where that is no whole number above 0, which is a problem of its own."""
        batch = getattr(self.source, "batch", 1)
        return batch if isinstance(batch, int) and batch > 0 else 1
