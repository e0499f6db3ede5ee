"""The metrics of each step: means of what stages report, seconds, and counts of admitted and dropped groups. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pipeline.declare.task import Task
from pipeline.plan.plan import Plan
from pipeline.schedule.events import CANCELLED, STALE


class _StepSums:
    """The sums and counts of one step in flight."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.admitted = 0
        self.claimed = 0
        self.dropped: Counter[str] = Counter()  # by reason: the gate's name, STALE or CANCELLED
        self.counts: Counter[str] = Counter()  # of the data plane
        self.first_admitted_s: float | None = None


class Tally:
    """Accumulates the metrics of the steps in flight."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps: dict[int, _StepSums] = {}
        self._pooled: dict[int, list[tuple[dict[str, float], float]]] = {}  # by group, until a step claims it
        self._claimed: dict[int, int] = {}  # claimed group of a step in flight -> its step
        self._done = -2  # the last step that was closed

    def admitted(self, step: int, groups: int, at_s: float) -> None:
        """Count groups admitted to a step."""
        numbers = self._of(step)
        numbers.admitted += groups
        if numbers.first_admitted_s is None:
            numbers.first_admitted_s = at_s

    def dropped(self, step: int, groups: Sequence[int], reason: str) -> None:
        """Count groups dropped from a step. `reason` is the gate's name, STALE or CANCELLED. The metrics of groups that
        the gate dropped count in the step."""
        self._of(step).dropped[reason] += len(groups)
        for group in groups:
            for metrics, weight in self._pooled.pop(group, ()):
                if reason not in (STALE, CANCELLED):
                    self._add(step, metrics, weight)

    def claimed(self, step: int, groups: Sequence[int]) -> None:
        """Assign groups claimed from the pool to a step, with the metrics reported for them so far."""
        self._of(step).claimed += len(groups)
        for group in groups:
            self._claimed[group] = step
            for metrics, weight in self._pooled.pop(group, ()):
                self._add(step, metrics, weight)

    def report(self, task: Task, metrics: dict[str, float], samples: int, groups: Sequence[int]) -> None:
        """Add the metrics of a task, averaged over the `samples` samples of `groups`; 0 for a task without samples.

        Metrics of a pool stage are kept by group until a step claims the group.
        """
        if not metrics:
            return
        if task.stage not in self._plan.pool or not groups:
            return self._add(task.step, metrics, float(samples or 1))
        weight = samples / len(groups)
        for group in groups:
            if group in self._claimed:
                self._add(self._claimed[group], metrics, weight)
            else:
                self._pooled.setdefault(group, []).append((metrics, weight))

    def took(self, step: int, what: str, seconds: float) -> None:
        """Add seconds to `time/<what>_s`."""
        numbers = self._of(step)
        numbers.seconds[what] = numbers.seconds.get(what, 0.0) + seconds

    def count(self, step: int, counts: Mapping[str, int]) -> None:
        """Add to numbers that are summed over the tasks of a step."""
        self._of(step).counts.update(counts)

    def close(self, step: int, now_s: float) -> dict[str, float]:
        """Close a finished step. Returns all its metrics."""
        numbers = self._of(step)
        self._steps.pop(step, None)
        self._done = max(self._done, step)
        self._claimed = {group: of for group, of in self._claimed.items() if of > step}
        metrics = {name: value / numbers.weights[name] for name, value in numbers.sums.items()}
        if numbers.first_admitted_s is not None:
            numbers.seconds.setdefault("step", now_s - numbers.first_admitted_s)
        metrics |= {f"time/{name}_s": value for name, value in numbers.seconds.items()}
        metrics |= _data(numbers.counts)
        # What is in the pool was admitted for any of the next steps.
        admitted = numbers.claimed + numbers.dropped.total() if self._plan.pool else numbers.admitted
        if self._plan.gate is not None and admitted:
            name = self._plan.gate.stage
            metrics |= {
                f"{name}/admitted": float(admitted),
                f"{name}/dropped": float(numbers.dropped[name]),
                f"{name}/acceptance": 1 - numbers.dropped[name] / admitted,
            }
        if self._plan.drops_stale:
            metrics |= {f"dropped/{reason}": float(numbers.dropped[reason]) for reason in (STALE, CANCELLED)}
        return dict(sorted(metrics.items()))

    def _add(self, step: int, metrics: dict[str, float], weight: float) -> None:
        numbers = self._of(step)
        for name, value in metrics.items():
            numbers.sums[name] = numbers.sums.get(name, 0.0) + weight * value
            numbers.weights[name] = numbers.weights.get(name, 0.0) + weight

    def _of(self, step: int) -> _StepSums:
        """Return the numbers of a step, or of the next open one if it is closed: late reports count there."""
        step = max(step, self._done + 1)
        return self._steps.setdefault(step, _StepSums())


def _data(counts: Counter[str]) -> dict[str, float]:
    """Return the metrics of the data plane: bytes by edge, requests, and the share of columns found in a cache."""
    hits, misses = counts.pop("hits", 0), counts.pop("misses", 0)
    found = {f"data/{name}": float(count) for name, count in counts.items()}
    return found | ({"data/cache_hits": hits / (hits + misses)} if hits + misses else {})
