"""Whether a gate has dropped more groups of a batch than it may, and what to say then. Pure.

drops = GateDrops(plan.gate, plan.batch, {3: "lost:open:OSError"})          # groups -> why
drops.problem("graph.py:12", step=4, sampled=9)                             # None: it may
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.errors import Problem
from pipeline.plan.plan import PlannedGate


@dataclass(frozen=True)
class GateDrops:
    """The groups of one batch that a gate has dropped, in their order, and why."""

    gate: PlannedGate
    batch: int
    refused: Mapping[int, str]

    def problem(self, where: str, *, step: int, sampled: int) -> Problem | None:
        """Return why the run ends; None if it goes on. `sampled` groups were decided, or wait to be, for this step."""
        faults = [group for group, reason in self.refused.items() if self._is_fault(reason)]
        if len(faults) > self._faults_allowed:
            return self._faulty(where, step, faults)
        if len(self.refused) + self.batch > self.gate.max_groups:
            return self._exhausted(where, step, sampled, mostly_faults=2 * len(faults) > len(self.refused))
        return None

    def _is_fault(self, reason: str) -> bool:
        """Return whether it was dropped since something failed, of which the gate allows only so much."""
        return bool(self.gate.fault) and reason.startswith(self.gate.fault)

    @property
    def _faults_allowed(self) -> float:
        """The most faults of a step. With any share, one may be in each."""
        most = self.gate.most_faults
        return max(1.0, most * (self.batch + len(self.refused))) if most else 0.0

    def _faulty(self, where: str, step: int, faults: Collection[int]) -> Problem:
        gate, sampled = self.gate, self.batch + len(self.refused)
        return Problem(
            where=where,
            what=f"stage {gate.stage!r} dropped {len(faults)} of the {sampled} groups sampled "
            f"for step {step + 1} since something failed: {_counted([self.refused[group] for group in faults])}; "
            f"the last one is group {[*faults][-1]}",
            why=f"at most {gate.most_faults:.0%} of a step may fail, so that a run does not go on with what is left",
            fix="correct what failed, whose output is in logs/ of the run, or allow more",
        )

    def _exhausted(self, where: str, step: int, sampled: int, *, mostly_faults: bool) -> Problem:
        gate, batch = self.gate, self.batch
        return Problem(
            where=where,
            what=f"stage {gate.stage!r} dropped {len(self.refused)} of {sampled} groups at step {step + 1} "
            f"and the batch of {batch} is not full: {_counted(self.refused.values())}",
            why=f"max_rounds={gate.max_groups // batch} allows {gate.max_groups} groups per step, so that a model that "
            "learns nothing from its prompts does not sample forever",
            fix="correct what failed, whose output is in logs/ of the run"
            if mostly_faults
            else "use prompts that the model solves only sometimes, more samples per prompt, or a larger max_rounds",
        )


def _counted(reasons: Collection[str]) -> str:
    """The three most common reasons with their numbers, and the number of others."""
    common = Counter(reasons).most_common(3)
    others = len(reasons) - sum(count for _, count in common)
    return ", ".join(f"{count} ({reason})" for reason, count in common) + (f", {others} others" if others else "")
