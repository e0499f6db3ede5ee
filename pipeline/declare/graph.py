"""What the user writes: `Graph`, `Model`, `WorkerGroup`, `Schedule`. Frozen descriptions; nothing runs here.

    Graph(name="grpo",
          source=Prompts("train.jsonl", batch=32),
          stages=(Rollout(policy, on=sampler, samples_per_prompt=8), Reward(exact_match), ...),
          schedule=Schedule(steps=100))

Edges come from field names. `pipeline.plan` turns a Graph into a Plan, or reports all its problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.declare.group import HOST, WorkerGroup, _Located
from pipeline.declare.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many steps to run, and how far rollout may run ahead.

    steps             batches to train on
    max_staleness     maximum age in versions of any trained token, relative to the weights it trains; 0 is synchronous
    pipeline_depth    batches that rollout may be ahead of train; None is max_staleness. Smaller values leave room for
                      slow samples
    on_stale          "wait": batches are fixed at admission and trained in order, so age is bounded and nothing is
                      lost. "drop": the first groups to finish form a batch; samples that would be too old are
                      dropped (canceled if they still run), counted and replaced
    refit             "drain": new weights wait until running sequences have finished. "in_flight": weights are swapped
                      between two tokens, and every token records its version
    capacity          maximum number of groups in the data plane; None means (max_staleness + 2) batches, so a slow
                      reader that trains nothing may lag one batch
    capacity_bytes    maximum bytes of samples in the data plane, counting each group at the most that it may take (the
                      plan's bounds, else the largest seen so far); a batch is always admitted if nothing is in flight.
                      None is no limit
    checkpoint_every  steps between checkpoints; 0 writes only the one at the end
    on_divergence     what happens when the metrics show that training diverges: "warn" says so once per kind, "stop"
                      also ends the run
    keep_checkpoints  how many of the newest checkpoints stay, 2 or more; an older one is removed once a new one is
                      complete. None keeps all
    keep_every        checkpoints after a multiple of this many steps stay for good; 0 is none. It needs
                      keep_checkpoints, and is a multiple of checkpoint_every
    keep_groups       groups per step whose texts are kept in the run directory: the first ones and the reward extremes
    seed              seeds everything random in the run
    """

    steps: int
    max_staleness: int = 0
    pipeline_depth: int | None = None
    on_stale: Literal["wait", "drop"] = "wait"
    refit: Literal["drain", "in_flight"] = "drain"
    capacity: int | None = None
    capacity_bytes: int | None = None
    checkpoint_every: int = 0
    on_divergence: Literal["warn", "stop"] = "warn"
    keep_checkpoints: int | None = None
    keep_every: int = 0
    keep_groups: int = 4
    seed: int = 0

    @property
    def ahead(self) -> int:
        """Batches that rollout may be ahead of train."""
        return self.max_staleness if self.pipeline_depth is None else min(self.pipeline_depth, self.max_staleness)


@dataclass(frozen=True, kw_only=True)
class Graph(_Located):
    """One training step. `source` provides the prompts; `stages` may be in any order."""

    name: str
    source: Stage
    stages: Sequence[Stage]
    schedule: Schedule
    host: WorkerGroup = field(default_factory=lambda: WorkerGroup(HOST))

    def all_stages(self) -> tuple[Stage, ...]:
        """Return the source and the stages."""
        return (self.source, *self.stages)

    @property
    def group_size(self) -> int:
        """Samples per prompt, from the stage that generates samples; 1 if there is none."""
        sizes = [stage.group_size for stage in self.all_stages() if stage.group_size]
        return sizes[0] if sizes and isinstance(sizes[0], int) else 1

    @property
    def batch(self) -> int:
        """Groups per step, from the source; 1 if that is invalid, which is reported separately."""
        batch = getattr(self.source, "batch", 1)
        return batch if isinstance(batch, int) and batch > 0 else 1
