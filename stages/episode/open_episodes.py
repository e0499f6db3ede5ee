"""The open episodes of a worker, counted by the part of their time that they are in. Knows no turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.episode.play import Play

EVERY_S = 1.0  # between two counts that nobody asked for


class OpenEpisodes:
    """Those of all tasks of a stage on this worker."""

    def __init__(self) -> None:
        self._plays: set[Play] = set()
        self._said: dict[str, int] = {}
        self._said_s = float("-inf")

    def add(self, plays: Iterable[Play]) -> None:
        """Count these, until they are over."""
        self._plays.update(plays)

    def remove(self, plays: Iterable[Play]) -> dict[str, int]:
        """Count these no longer. Returns the counts of the others."""
        self._plays.difference_update(plays)
        self._said = dict(Counter(play.times.now for play in self._plays if not play.is_over))
        self._said_s = time.monotonic()
        return self._said

    def changed(self) -> dict[str, int] | None:
        """The counts, if they are others than those of the last call, at least a second ago; else None."""
        if time.monotonic() - self._said_s < EVERY_S:
            return None
        before = self._said
        now = self.remove(())
        return now if now != before else None
