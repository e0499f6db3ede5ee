"""Records dropped groups, with the reason and their lengths.

A group that is canceled while it is sampled is recorded when its worker acknowledges: only then is its length known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pipeline.engine.journal import Journal
from pipeline.engine.steps import Steps
from pipeline.schedule.events import CANCELLED, Drop


class Drops:
    """`lengths` returns the longest response of each group, in tokens. With `at_once`, cancellations are recorded
    without waiting for the workers to acknowledge, with the lengths known so far."""

    def __init__(
        self, journal: Journal, steps: Steps, lengths: Callable[[Sequence[int]], tuple[int, ...]], *, at_once: bool
    ) -> None:
        self._journal, self._steps, self._lengths, self._at_once = journal, steps, lengths, at_once
        self.cancelled: dict[int, int] = {}  # groups being canceled -> the step that they were too old for

    def take(self, decision: Drop) -> None:
        """Record groups that the scheduler drops as too old; canceled ones follow when acknowledged."""
        if decision.reason == CANCELLED and not self._at_once:
            self.cancelled.update(dict.fromkeys(decision.groups, decision.step))
        else:
            self._record("", decision.step, decision.groups, decision.reason)

    def refused(self, stage: str, step: int, reasons: Mapping[int, str]) -> None:
        """Record groups that the gate `stage` drops, one event per reason."""
        for reason in dict.fromkeys(reasons.values()):
            self._record(stage, step, tuple(group for group, why in reasons.items() if why == reason), reason)

    def acknowledged(self, groups: Iterable[int], given_up: Mapping[int, int]) -> None:
        """Record the canceled ones among acknowledged groups. `given_up` has the tokens of unfinished ones."""
        for group in groups:
            if group in self.cancelled:
                tokens = (given_up[group],) if group in given_up else self._lengths((group,))
                self._record("", self.cancelled.pop(group), (group,), CANCELLED, tokens)

    def unheard(self, groups: Iterable[int]) -> None:
        """Record the canceled ones among groups without waiting for acknowledgments. Their lengths are unknown."""
        for group in [group for group in groups if group in self.cancelled]:
            self._record("", self.cancelled.pop(group), (group,), CANCELLED, ())

    def _record(
        self, stage: str, step: int, groups: tuple[int, ...], reason: str, tokens: tuple[int, ...] | None = None
    ) -> None:
        self._steps.dropped(step, groups, stage or reason)
        self._journal.dropped(stage, step, groups, reason, self._lengths(groups) if tokens is None else tokens)
