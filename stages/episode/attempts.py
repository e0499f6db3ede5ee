"""One episode in its environment: calls with deadlines, repeated in a fresh process if they fail. Knows no tokens.

Draws are repeated, so a failure at the same turn of a fresh environment is the policy's doing, and one that does not
come again was the machine's, as is the loss of the worker beside it. What the policy caused is an end like others,
`failed:<turn>:<kind>`; an episode that fails otherwise, more than `retries` times, is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from pipeline.declare.times import SampleTimes
from stages.episode.environment import Deadlines, End, Messages, Reply, Said
from stages.episode.frames import HostAnswer
from stages.episode.processes import EnvironmentFailedError, PlaceLostError
from stages.vocabulary import LOST

MOST_SAID = 20
_said: set[str] = set()  # by this process


class EpisodeLostError(Exception):
    """An episode that machines have failed: the method, and the kind of its last failure."""

    def __init__(self, failed: EnvironmentFailedError) -> None:
        super().__init__(f"{LOST}{failed.method}:{failed.kind}")

    @property
    def end(self) -> str:
        """How the episode ended."""
        return str(self)


def _say(text: str) -> None:
    """Print what has failed, to the worker's log: each text once, and not more than a few."""
    if text not in _said and len(_said) < MOST_SAID:
        _said.add(text)
        print(text, file=sys.stderr, flush=True)


class EnvironmentPlace(Protocol):
    """Where an environment of an episode is, such as `stages.episode.processes.EnvironmentProcess`."""

    episodes: set[int]

    async def ask(
        self, method: str, episode: int, deadline_s: float, times: SampleTimes | None = None, **given: Any
    ) -> HostAnswer:
        """Call "open" with a row and a seed, "turn" with a reply, or "close". Raises EnvironmentFailedError. `times`
        gets the time until the call was sent, and that of the environment."""

    def start(self, method: str, episode: int, deadline_s: float, **given: Any) -> Any:
        """Call it without waiting for its answer."""

    def kill(self) -> None:
        """End it at once."""


class Places(Protocol):
    """Where environments can be, such as `stages.episode.processes.Processes`. `closes` says whether the end of one is
    waited for."""

    closes: bool

    def number(self) -> int:
        """A number for the next episode."""

    def place(self) -> EnvironmentPlace:
        """A place for an episode."""

    def fresh(self) -> EnvironmentPlace:
        """A place for one episode alone, whose owner kills it."""


class Attempts:
    """An episode in environments, one after the other. `tools` are those that only this episode has, as schemas; `most`
    is the most tokens that its environment wants of the next turn, 0 if it does not say."""

    def __init__(
        self,
        places: Places,
        row: Mapping[str, Any],
        seed: tuple[int, ...],
        deadlines: Deadlines,
        retries: int,
        times: SampleTimes | None = None,
    ) -> None:
        self._places, self._number, self._row, self._seed = places, places.number(), dict(row), seed
        self._deadlines, self._left, self._times = deadlines, retries, times
        self._place: EnvironmentPlace | None = None
        self._own = False  # whether the process is this episode's alone
        self._failed = False  # whether an environment has, and not only the place where it was
        self._turns: list[tuple[Reply, Messages]] = []  # that were answered
        self._first: Said = ""
        self.tools: Sequence[dict[str, Any]] = ()
        self.most = 0
        self.retried = 0

    async def open(self) -> Said:
        """What the policy sees first. Raises EpisodeLostError."""
        while True:
            try:
                self._first = await self._opened()
                return self._first
            except EnvironmentFailedError as error:
                self._again(error)

    async def turn(self, reply: Reply) -> Messages | End:
        """The environment's answer. Raises EpisodeLostError."""
        failures = 0
        while True:
            try:
                if self._place is None:
                    await self._replayed()
            except EnvironmentFailedError as error:
                self._again(error)
                continue
            try:
                found = await self._asked_turn(reply)
            except EnvironmentFailedError as error:
                failures += not isinstance(error, PlaceLostError)
                if failures > 1:  # in a fresh environment, at the same turn
                    _say(f"an environment has failed twice at turn {len(self._turns)}: {error}")
                    await self.close()
                    return End("deadline" if error.kind == "deadline" else f"failed:{len(self._turns)}:{error.kind}")
                self._again(error)
                continue
            if isinstance(found, Messages):
                self._turns.append((reply, found))
            return found

    async def close(self) -> None:
        """Close the environment, if it is open."""
        place, self._place = self._place, None
        if place is None:
            return
        if self._places.closes:
            try:
                with suppress(EnvironmentFailedError):
                    await place.ask("close", self._number, self._deadlines.close_s, self._times)
            finally:
                place.episodes.discard(self._number)
                if self._own:
                    place.kill()
        else:
            self._leave(place)

    def give_up(self) -> None:
        """The episode is no longer wanted, and nobody waits for it."""
        place, self._place = self._place, None
        if place is not None:
            self._leave(place)

    async def _opened(self) -> Said:
        self._own = self._failed
        self._place = self._places.fresh() if self._own else self._places.place()
        self._place.episodes.add(self._number)
        asked = {"row": self._row, "seed": self._seed}
        answer = await self._place.ask("open", self._number, self._deadlines.open_s, self._times, **asked)
        assert answer.said is not None
        self.tools, self.most = answer.tools, answer.most
        return answer.said

    async def _replayed(self) -> None:
        """Open a fresh environment, and play the turns so far. Raises EnvironmentFailedError if it differs."""
        if await self._opened() != self._first:
            raise EnvironmentFailedError("open", "differed")
        for reply, before in self._turns:
            if await self._asked_turn(reply) != before:
                raise EnvironmentFailedError("turn", "differed")

    async def _asked_turn(self, reply: Reply) -> Messages | End:
        assert self._place is not None
        answer = await self._place.ask("turn", self._number, self._deadlines.turn_s, self._times, reply=reply)
        self.most = answer.most
        return answer.returned

    def _again(self, error: EnvironmentFailedError) -> None:
        """Leave the environment that has failed. Raises EpisodeLostError if it may not be tried again."""
        place, self._place = self._place, None
        if place is not None:
            self._leave(place)
        if not self._left:
            raise EpisodeLostError(error)
        self._left -= 1
        self.retried += 1
        self._failed = self._failed or not isinstance(error, PlaceLostError)

    def _leave(self, place: EnvironmentPlace) -> None:
        """Close the environment without waiting for it."""
        place.episodes.discard(self._number)
        if self._own:
            place.kill()
        else:
            place.start("close", self._number, self._deadlines.close_s)
