"""Kills workers that hang without dying: stopped, unreachable, or in code that never releases the GIL.

A worker answers heartbeats in a separate thread, so a task may take as long as it needs. Silence is counted in missed
polls, not read from a clock, so a driver that was itself suspended does not find everyone late. Knows actors with a
method `beat`; not what they do or who replaces them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError

DEADLINE_S = 60.0  # imports and calls that hold the GIL take seconds when cores are scarce
LOOKS = 12  # per deadline
ANSWER_S = 10.0  # for a worker to answer whether it lives


class Heartbeat:
    """The heartbeats of the watched workers."""

    def __init__(self) -> None:
        self._beats: dict[Any, ray.ObjectRef] = {}  # by worker: the outstanding call
        self._missed: dict[Any, int] = {}
        self._looked_s = 0.0
        self._ended: set[Any] = set()

    def watch(self, workers: Iterable[Any]) -> None:
        """Start watching workers that are set up. Model loading has its own deadline."""
        self._beats.update((worker, worker.beat.remote()) for worker in workers)

    def look(self) -> None:
        """Poll the replies and kill overdue workers. Does nothing before the next poll is due; never blocks."""
        now_s = time.monotonic()
        if not self._beats or now_s - self._looked_s < DEADLINE_S / LOOKS:
            return
        self._looked_s = now_s
        answered, _ = ray.wait(list(self._beats.values()), num_returns=len(self._beats), timeout=0, fetch_local=False)
        late = self._beats.keys() - {worker for worker, beat in self._beats.items() if beat in answered}
        self._missed = missed(self._missed, late)
        for worker in overdue(self._missed):
            self._ended.add(worker)
            self.forget(worker)
            ray.kill(worker)  # kills a stopped process too: Ray asks first and sends SIGKILL five seconds later
        self.watch(self._beats.keys() - late)

    def forget(self, worker: Any) -> None:
        """Stop watching a worker."""
        self._beats.pop(worker, None)

    def fate(self, worker: Any) -> str:
        """Return why a worker is gone."""
        return f"has not answered for {DEADLINE_S:g} s" if worker in self._ended else "died"


def dead(workers: Iterable[Any]) -> tuple[Any, RayActorError] | None:
    """Return one of these workers that is dead, with Ray's error, or None.

    A worker that lost its connection to a dead one can report that before Ray reports the death. A call made after that
    report settles it: a process that is gone cannot answer.
    """
    beats = {worker.beat.remote(): worker for worker in workers}
    waiting, ends_s = list(beats), time.monotonic() + ANSWER_S
    while waiting and (left_s := ends_s - time.monotonic()) > 0:
        ready, waiting = ray.wait(waiting, timeout=left_s)
        for beat in ready:
            try:
                ray.get(beat)
            except RayActorError as error:
                return beats[beat], error
    return None


def missed(before: Mapping[Any, int], late: Iterable[Any]) -> dict[Any, int]:
    """Count one more poll. Returns how many polls in a row found each worker late."""
    return {worker: before.get(worker, 0) + 1 for worker in late}


def overdue(missed: Mapping[Any, int]) -> list[Any]:
    """Return the workers that were late for a whole deadline."""
    return [worker for worker, looks in missed.items() if looks >= LOOKS]
