"""A view of plan.json for checking a record; derived from reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Planned:
    """A plan, and the number of steps its run was started for.

    holding   stages that read or write samples: their tasks have groups
    pool      stages that run before a group is claimed
    """

    def __init__(self, plan: dict[str, Any], steps: int) -> None:
        self.steps = steps
        self.batch, self.group_size, self.capacity = plan["batch"], plan["group_size"], plan["capacity"]
        self.max_staleness, self.ahead = plan["max_staleness"], plan["ahead"]
        self.pooled, self.drains = bool(plan["pool"]), plan["refit"] == "drain"
        self.drops = self.pooled and plan["on_stale"] == "drop"
        self.checkpoint_every = plan["checkpoint_every"]
        self.pool = set(plan["pool"])
        self.gate: dict[str, Any] | None = plan["gate"]
        self.stages: dict[str, dict[str, Any]] = {stage["name"]: stage for stage in plan["stages"]}
        placed = [*plan["groups"], *plan.get("servers", ())]
        self.worker_groups: dict[str, dict[str, Any]] = {group["name"]: group for group in placed}
        self.fences: list[dict[str, Any]] = plan["fences"]
        self._weights = set(plan["weights_fields"])
        self.writer = {field: stage["name"] for stage in plan["stages"] for field in stage["writes"]}
        self.internal = {name for name, stage in self.stages.items() if stage["shape"] != "external"}
        self.transfers = [name for name in self.internal if self.stages[name]["shape"] == "transfer"]
        self.trainers = [name for name in self.internal if self.stages[name]["updates"]]
        self.stamping = {name for name in self.internal if self.stages[name]["stamps"]}
        self.stamps = {self.stages[name]["stamps"] for name in self.stamping}
        self.holding = {name for name in self.internal if self.waits(name) or self.sample_writes(name)}
        self.partitions = {made["name"]: set(made["fields"]) for made in plan["partitions"]}
        self._partition_holders = {made["name"]: set(made["holders"]) for made in plan["partitions"]}
        self._before_gate = {name for name in self.holding if self.gate and self.gate["field"] not in self.waits(name)}

    def sample_reads(self, stage: str) -> set[str]:
        """Return the sample fields that a stage reads."""
        return set(self.stages[stage]["reads"]) - self._weights

    def waits(self, stage: str) -> set[str]:
        """Return the sample fields that must be present for a group before a stage starts on it."""
        return self.sample_reads(stage) | set(self.stages[stage]["awaits"])

    def sample_writes(self, stage: str) -> set[str]:
        """Return the sample fields that a stage writes."""
        return set(self.stages[stage]["writes"]) - self._weights

    def weights_reads(self, stage: str) -> set[str]:
        """Return the weights of the same step that a stage waits for."""
        return set(self.stages[stage]["reads"]) & self._weights

    def runs_at(self, stage: str, step: int) -> bool:
        """Return whether a stage runs at a step."""
        return (step + 1) % self.stages[stage]["every"] == 0 or step == self.steps - 1

    def opens(self, stage: str, start: int) -> bool:
        """Return whether a stage runs once before the first step: it publishes weights, or reads nothing but those."""
        reads = set(self.stages[stage]["reads"])
        published = {field for name in self.transfers for field in self.stages[name]["writes"]}
        return stage in self.transfers or (start == 0 and bool(reads) and reads <= published)

    def holders(self, step: int) -> set[str]:
        """Return the stages that run on the groups of a step."""
        return {name for name in self.holding if self.runs_at(name, step)}

    def partition_holders(self, name: str) -> set[str]:
        """Return the stages that read or write a partition; all that hold samples if an outside process writes it."""
        return self._partition_holders[name] or self.holding

    def is_before_gate(self, stage: str) -> bool:
        """Return whether a stage also gets groups that the gate drops."""
        return stage in self._before_gate

    def replicas(self, stage: str) -> int:
        """Return how many tasks the worker group of a stage can run at the same time."""
        group = self.worker_groups[self.stages[stage]["groups"][0]]
        return max(1, group["workers"] // group["model_parallel"])

    def siblings(self, stage: str) -> int:
        """Return how many workers hold one model together."""
        return self.worker_groups[self.stages[stage]["groups"][0]]["model_parallel"]

    def fetched(self, stage: str, groups: int) -> int:
        """Return the number of samples whose columns a task on this many groups fetches."""
        if not self.sample_reads(stage):
            return 0
        first, looked_at = self.stages[stage]["first_groups"], groups if self.stages[stage]["chooses"] else 0
        return (looked_at + (groups if first is None else min(first, groups))) * self.group_size

    def checkpoints_before(self, step: int, start: int) -> Iterator[int]:
        """Yield the steps, from `start` to before `step`, after which a checkpoint is due."""
        every = self.checkpoint_every
        return (done for done in range(start, step) if self.trainers and every and (done + 1) % every == 0)
