"""Samples the turns of many episodes with an engine that samples single responses. Knows no environments.

A backend whose running batch takes further samples (`Backend.joins`) gets each turn as soon as it is asked for.
Others decode a batch from its first to its last token; they get the turns of all episodes together, once none is in its
environment, in the order of the episodes: what is computed together does not depend on how long environments take.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pipeline.declare.columns import Ragged
from pipeline.declare.times import GENERATE, QUEUE, WORKER, SampleTimes
from stages.backends import Cancelled, Decoded, Draws, Generation, Sampling, part

if TYPE_CHECKING:
    from stages.episode.kept_turns import KeptTurns

LOOK_S = 0.005  # between two looks whether cancelled turns have ended


@dataclass(frozen=True)
class NextTurn:
    """The tokens that the policy sees, and how many of them belong to the response, with the most that it may add.
    `number` counts the turns of the episode."""

    ids: torch.Tensor
    place: int
    most: int
    number: int = 0


@dataclass(frozen=True)
class EpisodeName:
    """The admission number of an episode's group, and its index in the group."""

    group: int
    sample: int


@dataclass
class _AskedTurn:
    """A turn that was asked for. `begun_s` is when its wave began."""

    turn: NextTurn
    future: asyncio.Future[Generation]
    begun_s: float | None = None


class TurnSampler:
    """Samples turns of the `open` episodes. `draw` is `SamplingStage.drawn` of a backend; `unwanted` says whether a
    group was cancelled. What `kept` has is not sampled again; without waves that goes for each turn, otherwise for
    waves of which it has all, since what is computed together decides about rounding."""

    def __init__(
        self,
        draw: Callable[..., AsyncGenerator[Decoded | Cancelled, None]],
        sampling: Sampling,
        *,
        seed: int,
        version: int,
        joins: bool,
        unwanted: Callable[[int], bool],
        kept: KeptTurns | None = None,
    ) -> None:
        self._draw, self._sampling, self._unwanted = draw, sampling, unwanted
        self._seed, self.version, self._joins, self._kept = seed, version, joins, kept
        self.found: Counter[EpisodeName] = Counter()  # turns that were kept
        self._open: set[EpisodeName] = set()
        self._asked: dict[EpisodeName, _AskedTurn] = {}
        self._waves: set[asyncio.Task[None]] = set()
        self._running: dict[asyncio.Future[Generation], EpisodeName] = {}  # turns that the engine has
        self._given_up: dict[EpisodeName, int] = {}  # tokens of the turn that was cancelled

    def enter(self, episode: EpisodeName) -> None:
        """Open an episode, before any that began with it asks for a turn."""
        self._open.add(episode)

    def leave(self, episode: EpisodeName) -> None:
        """An episode has ended."""
        self._open.discard(episode)
        if left := self._asked.pop(episode, None):
            left.future.cancel()
        self._begin()

    async def sample(self, episode: EpisodeName, turn: NextTurn, times: SampleTimes | None = None) -> Generation:
        """Sample one turn of an episode. Raises CancelledError if its group is cancelled. `times` gets the time until
        its wave began, and that of the wave; a backend whose batch takes further samples has no waves."""
        times = times or SampleTimes()
        times.until(WORKER)
        self._asked[episode] = asked = _AskedTurn(turn, asyncio.get_running_loop().create_future())
        times.during = lambda: QUEUE if asked.begun_s is None else GENERATE
        self._begin()
        try:
            return await asked.future
        finally:
            if not self._joins:
                times.until(QUEUE, asked.begun_s)
            if asked.begun_s is not None:
                times.until(GENERATE)

    async def given_up(self, group: int) -> dict[EpisodeName, int]:
        """The tokens of turns that were cancelled, by episode of a cancelled group, once all of them have ended."""
        while any(name.group == group for name in self._running.values()):
            await asyncio.sleep(LOOK_S)
        return {name: tokens for name, tokens in self._given_up.items() if name.group == group}

    async def close(self) -> None:
        """End what is being sampled."""
        for wave in self._waves:
            wave.cancel()
        await asyncio.gather(*self._waves, return_exceptions=True)

    def _begin(self) -> None:
        if not self._asked or (len(self._asked) < len(self._open) and not self._joins):
            return
        asked, self._asked = self._asked, {}
        now_s = time.monotonic()
        for one in asked.values():
            one.begun_s = now_s
        wave = asyncio.ensure_future(self._wave(asked))
        self._waves.add(wave)
        wave.add_done_callback(self._waves.discard)

    async def _wave(self, asked: dict[EpisodeName, _AskedTurn]) -> None:
        names = sorted(asked, key=lambda name: (name.group, name.sample))
        futures = [asked[name].future for name in names]
        self._running.update(zip(futures, names, strict=True))
        try:
            left = self._left(asked, names)
            if left:
                await self._sampled(left, [asked[name].turn for name in left], [asked[name].future for name in left])
        except Exception as error:  # noqa: BLE001 - raised where the turns are awaited
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        finally:
            for future in futures:
                self._running.pop(future, None)
                future.cancel()

    def _left(self, asked: dict[EpisodeName, _AskedTurn], names: Sequence[EpisodeName]) -> list[EpisodeName]:
        """Answer the turns that are kept. Returns the episodes of all others."""
        if self._kept is None or self._kept.is_empty:
            return list(names)
        found = {name: made for name in names if (made := self._kept.find(self.version, name, asked[name].turn))}
        if len(found) < len(names) and not self._joins:
            return list(names)
        self.found.update(found.keys())
        for name, made in found.items():
            self._running.pop(asked[name].future, None)
            if not asked[name].future.done():
                asked[name].future.set_result(made)
        return [name for name in names if name not in found]

    async def _sampled(
        self, names: Sequence[EpisodeName], turns: Sequence[NextTurn], futures: Sequence[asyncio.Future[Generation]]
    ) -> None:
        limits = tuple(turn.most for turn in turns)
        places = tuple(turn.place for turn in turns)
        stream = self._draw(
            Ragged.of([turn.ids for turn in turns]),
            replace(self._sampling, limits=limits),
            Draws(self._seed, tuple(name.group for name in names), tuple(name.sample for name in names), places),
            group_size=1,
            version=self.version,
            unwanted=lambda position: self._unwanted(names[position].group) or futures[position].cancelled(),
        )
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Cancelled):
                    for position, tokens in event.tokens.items():
                        self._given_up[names[position]] = tokens
                        self._running.pop(futures[position], None)
                        futures[position].cancel()
                else:
                    for row, position in enumerate(event.groups):
                        self._running.pop(futures[position], None)
                        if futures[position].done():
                            self._given_up[names[position]] = event.made.response_ids.lengths[row]
                        else:
                            made = one_of(event.made, row)
                            if self._kept is not None:
                                self._kept.keep(names[position], turns[position], made)
                            futures[position].set_result(made)


def one_of(made: Generation, row: int) -> Generation:
    """Return one sample of several."""
    return Generation(
        part(made.response_ids, [row]),
        part(made.logprobs, [row]),
        made.truncated[row : row + 1],
        part(made.versions, [row]),
    )
