"""Ends workers that hang without dying: stopped, out of reach, or in code that never gives Python's lock back.

A worker answers a beat in a thread of its own, so its task may take as long as it likes, in C or in Python. How long it
is silent is counted in looks and not read from a clock: a driver that was stopped itself finds nobody late. Knows
actors with a method `beat`; not what they do, and not who takes their place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray

DEADLINE_S = 60.0  # an import or a call that keeps Python's lock takes seconds, also where cores are short
LOOKS = 12  # in a deadline


class Heartbeat:
    """Of the workers that it is told to watch."""

    def __init__(self) -> None:
        self._beats: dict[Any, ray.ObjectRef] = {}  # by worker: the call that is to be answered
        self._missed: dict[Any, int] = {}
        self._looked_s = 0.0
        self._ended: set[Any] = set()

    def watch(self, workers: Iterable[Any]) -> None:
        """From now on. For workers that are set up: models are loaded under a deadline of their own."""
        self._beats.update((worker, worker.beat.remote()) for worker in workers)

    def look(self) -> None:
        """See who has answered, and kill who is overdue; most calls come too soon for that. Never waits for anybody."""
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
            ray.kill(worker)  # ends a stopped process too: Ray asks it first, and sends SIGKILL five seconds later
        self.watch(self._beats.keys() - late)

    def forget(self, worker: Any) -> None:
        """It is no worker any more."""
        self._beats.pop(worker, None)

    def fate(self, worker: Any) -> str:
        """What became of a worker that is no more."""
        return f"has not answered for {DEADLINE_S:g} s" if worker in self._ended else "died"


def missed(before: Mapping[Any, int], late: Iterable[Any]) -> dict[Any, int]:
    """How many looks in a row have found each worker late, after one more."""
    return {worker: before.get(worker, 0) + 1 for worker in late}


def overdue(missed: Mapping[Any, int]) -> list[Any]:
    """Who has been late for a whole deadline."""
    return [worker for worker, looks in missed.items() if looks >= LOOKS]
