"""Groups that leave without being trained: who they were, and how long.

A group that is cancelled while it is sampled leaves the record when its worker acknowledges that: only then is known
how long it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pipeline.engine.journal import Journal
from pipeline.engine.steps import Steps
from pipeline.schedule.events import CANCELLED, Drop


class Drops:
    """`lengths` says how many tokens the longest response of each group has. With `at_once` nobody waits for workers to
    acknowledge what they give up: what is not known is then 0 tokens long."""

    def __init__(
        self, journal: Journal, steps: Steps, lengths: Callable[[Sequence[int]], tuple[int, ...]], *, at_once: bool
    ) -> None:
        self._journal, self._steps, self._lengths, self._at_once = journal, steps, lengths, at_once
        self.cancelled: dict[int, int] = {}  # groups that are to be given up, and the step for which they were too old

    def take(self, decision: Drop) -> None:
        """The scheduler lets go of groups that are too old."""
        if decision.reason == CANCELLED and not self._at_once:
            self.cancelled.update(dict.fromkeys(decision.groups, decision.step))
        else:
            self._record("", decision.step, decision.groups, decision.reason)

    def refused(self, stage: str, step: int, reasons: Mapping[int, str]) -> None:
        """The gate `stage` drops groups, each for a reason."""
        for reason in dict.fromkeys(reasons.values()):
            self._record(stage, step, tuple(group for group, why in reasons.items() if why == reason), reason)

    def acknowledged(self, groups: Iterable[int], given_up: Mapping[int, int]) -> None:
        """A worker acknowledges groups: finished, or given up at that many tokens."""
        for group in groups:
            if group in self.cancelled:
                tokens = (given_up[group],) if group in given_up else self._lengths((group,))
                self._record("", self.cancelled.pop(group), (group,), CANCELLED, tokens)

    def unheard(self, groups: Iterable[int]) -> None:
        """Of these, those that were cancelled leave though no worker has acknowledged it; nobody knows their length."""
        for group in [group for group in groups if group in self.cancelled]:
            self._record("", self.cancelled.pop(group), (group,), CANCELLED, ())

    def _record(
        self, stage: str, step: int, groups: tuple[int, ...], reason: str, tokens: tuple[int, ...] | None = None
    ) -> None:
        self._steps.dropped(step, groups, stage or reason)
        self._journal.dropped(stage, step, groups, reason, self._lengths(groups) if tokens is None else tokens)
