"""Lets episodes begin, so many at a time as their stage allows. Knows no turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from stages.episode.turns import EpisodeName, TurnSampler


class Doors:
    """Lets at most `most` episodes be open at a time, in their order; 0 lets all in at once.

    If the engine decodes whole batches (not `joins`), they come in blocks: one begins when all of the block before have
    ended, so that what is decoded together does not depend on how long episodes take.
    """

    def __init__(self, turns: TurnSampler, names: Sequence[EpisodeName], *, most: int, joins: bool) -> None:
        self._turns, self._most, self._joins = turns, most or len(names), joins
        self._waiting = deque(names)
        self._inside: set[EpisodeName] = set()
        self._let_in = {name: asyncio.Event() for name in names}
        self._admit()

    async def enter(self, name: EpisodeName) -> None:
        """Wait until an episode may begin."""
        await self._let_in[name].wait()

    def leave(self, name: EpisodeName) -> None:
        """An episode has ended, or will not begin."""
        self._inside.discard(name)
        if name in self._waiting:
            self._waiting.remove(name)
        self._turns.leave(name)
        self._admit()

    def _admit(self) -> None:
        if self._inside and not self._joins:
            return
        while self._waiting and len(self._inside) < self._most:
            name = self._waiting.popleft()
            self._inside.add(name)
            self._turns.enter(name)
            self._let_in[name].set()
