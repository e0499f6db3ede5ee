"""Estimates how long the remaining steps of a run take, from how long those so far took. Pure.

    left = TimeLeft(plan, start=0)
    left.took(0, 3.1)
    left.seconds()

A step with an evaluation, another stage that runs now and then, or a checkpoint is of a kind of its own, and so is the
step after it, which may have begun meanwhile. The steps to come are counted by kind. The first steps of a run are slow:
they count only as long as there are few others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from pipeline.plan.plan import Plan

RECENT = 20  # steps of a kind that its estimate averages over
WARM_UP = 3  # steps of a kind that are left out, once there are three times as many
STALL = 3.0  # a step that took this many times the others together says nothing about those to come

Kind = tuple[str, ...]  # what ran besides the stages of every step, or in the step before
FIRST: Kind = ("first",)


class TimeLeft:
    """The time left in a run, or in its part after `start` steps."""

    def __init__(self, plan: Plan, start: int) -> None:
        self._plan, self._start, self._done = plan, start, start
        self._ahead = self._kinds_from(start)
        self._took_s: dict[Kind, list[float]] = {}
        self._known_s: dict[str, float] = {}

    def before(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of what ran before the first step, with the seconds of its stages."""
        self._known_s = {stage.name: metrics.get(f"time/{stage.name}_s", 0.0) for stage in self._plan.stages}

    def took(self, step: int, seconds: float) -> None:
        """Note the time from the end of the step before to the end of this one."""
        kind = self._kind(step)
        self._took_s.setdefault(kind, []).append(seconds)
        if step == self._done:
            self._ahead[kind] -= 1
        else:  # the run has gone back to a checkpoint
            self._ahead = self._kinds_from(step + 1)
        self._done = step + 1

    def seconds(self) -> float:
        """Return the seconds until the last step ends."""
        return sum(count * self._step_s(kind) for kind, count in self._ahead.items())

    def _kinds_from(self, step: int) -> Counter[Kind]:
        """Count the steps to come by kind."""
        return Counter(map(self._kind, range(step, self._plan.steps)))

    def _kind(self, step: int) -> Kind:
        if step == self._start:
            return FIRST
        return (*self._besides(step), *(f"after {name}" for name in self._besides(step - 1)))

    def _besides(self, step: int) -> Iterator[str]:
        """Yield the stages of a step that do not run at every one, and whether a checkpoint is written."""
        steps, every = self._plan.steps, self._plan.checkpoint_every
        yield from (stage.name for stage in self._plan.stages if stage.every > 1 and stage.runs_at(step, steps))
        if step == steps - 1 or (every and (step + 1) % every == 0):
            yield "checkpoint"

    def _step_s(self, kind: Kind) -> float:
        if took := self._took_s.get(kind):
            return _mean(took)
        ordinary = self._took_s.get(()) or [took for took_s in self._took_s.values() for took in took_s]
        plain_s = _mean(ordinary) if ordinary else 0.0
        return max(0.0, plain_s + sum(self._more_s(name, plain_s) for name in kind))

    def _more_s(self, name: str, plain_s: float) -> float:
        """Return what one of the things of a kind adds to a step."""
        if took := self._took_s.get((name,)):
            return _mean(took) - plain_s
        return self._known_s.get(name, 0.0)


def _mean(took_s: Sequence[float]) -> float:
    recent = sorted(took_s[min(WARM_UP, len(took_s) // 3) :][-RECENT:])
    if len(recent) > 3 and recent[-1] > STALL * sum(recent[:-1]):
        recent.pop()
    return fmean(recent)
