"""Environments of a worker group, as a sampling worker sees them: on other workers, asked over connections.

    environments = ServedEnvironments(Calculator(), addresses, first=rank)
    place = environments.place()                           # at the worker with the fewest episodes of this one
    answer = await place.ask("open", episode=0, deadline_s=60.0, row={"prompt": "1+1="}, seed=(0, 0, 0))
    environments.close()

`addresses` may change: a worker that was replaced listens elsewhere. A call whose connection ends has failed, and it is
the place that has, not the environment. The clocks of two machines differ: the other worker says how many seconds the
environment took, and the rest of the time until the answer, the way there and back too, counts as waiting for a
process.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pipeline import StageError
from pipeline.declare.task import ServerAddress
from pipeline.declare.times import ENVIRONMENT, PROCESS, WORKER, SampleTimes
from stages.episode.admission import ADMISSION_S, enter, keep_alive
from stages.episode.environment import Environment
from stages.episode.frames import SentAnswer, SentCall, close_stream, frames, send_frame
from stages.episode.loop_thread import LoopThread
from stages.episode.processes import EnvironmentFailedError, PlaceLostError, frame_of, not_loaded

REACH_S = 60.0  # to reach a worker, which may have to be replaced first
AGAIN_S = 0.2  # between two tries


@dataclass
class _OpenCall:
    """A call that waits for its answer, and when that came."""

    call: SentCall
    frame: bytes
    future: Future[SentAnswer]
    answered_s: float | None = None


class Link:
    """The connection to one worker of the group, and the episodes there. `is_doubtful`: there was one before, which was
    lost, and this one has not come about yet. Its callbacks run in the loop of `environments`."""

    def __init__(self, environments: ServedEnvironments, at: int, *, is_doubtful: bool) -> None:
        self._environments, self._at = environments, at
        self.is_doubtful, self.is_lost = is_doubtful, False
        self.episodes: set[int] = set()
        self._waiting: dict[int, _OpenCall] = {}
        self._numbers = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        environments.loop.run(self._serve())

    def send(self, call: Mapping[str, Any]) -> _OpenCall:
        """Send a call, once there is a connection. Raises EnvironmentFailedError for one that cannot be sent."""
        asked = SentCall(number=next(self._numbers), **call)
        made = _OpenCall(asked, frame_of(asked), Future())
        self._environments.loop.soon(self._send, made)
        return made

    def _send(self, made: _OpenCall) -> None:
        if self._writer is None and made.call.method in ("close", "kill"):  # what it waits for was not asked yet
            for number in [each for each, other in self._waiting.items() if other.call.episode == made.call.episode]:
                self._fail(self._waiting.pop(number))
            self._fail(made)
            return
        if self.is_lost:
            self._fail(made)
            return
        if made.call.method != "kill":
            self._waiting[made.call.number] = made
        if self._writer is not None:
            send_frame(self._writer, made.frame)

    async def _serve(self) -> None:
        """Connect, and take answers until the connection ends."""
        try:
            async with asyncio.timeout(REACH_S):
                reader, writer = await self._connected()
            self.is_doubtful, self._writer = False, writer
            try:
                for made in self._waiting.values():
                    send_frame(writer, made.frame)
                async for answer in frames(reader, SentAnswer):
                    self._take(answer)
            finally:
                close_stream(writer)
        except TimeoutError:
            pass
        finally:
            self.is_lost = True
            while self._waiting:
                self._fail(self._waiting.popitem()[1])

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Try until the worker, or one that has taken its place, answers."""
        while True:
            address = self._environments.addresses[self._at]
            try:
                async with asyncio.timeout(ADMISSION_S):
                    reader, writer = await asyncio.open_connection(address.host, address.port)
                try:
                    await enter(address.key, reader, writer)
                    keep_alive(writer)
                    return reader, writer
                except BaseException:
                    close_stream(writer)
                    raise
            except (OSError, asyncio.IncompleteReadError):
                self.is_doubtful = True
                await asyncio.sleep(AGAIN_S)

    def _take(self, answer: SentAnswer) -> None:
        if (made := self._waiting.pop(answer.number, None)) is not None:
            made.answered_s = time.monotonic()
            if made.future.set_running_or_notify_cancel():
                made.future.set_result(answer)

    def _fail(self, made: _OpenCall) -> None:
        made.answered_s = time.monotonic()
        if made.future.set_running_or_notify_cancel():
            made.future.set_exception(PlaceLostError(made.call.method))


class ServedPlace:
    """A place for episodes on a worker of the group. `own`: in a process for one episode alone."""

    def __init__(self, link: Link, *, own: bool) -> None:
        self._link, self._own = link, own
        self.episodes = link.episodes
        self._episode = -1  # the last one, that is the one of its own process

    async def ask(
        self, method: str, episode: int, deadline_s: float, times: SampleTimes | None = None, **given: Any
    ) -> SentAnswer:
        """Call a method of the environment, as EnvironmentProcess does. Raises PlaceLostError if the connection ends.
        In `times`, a call that nobody waits for any more was in its environment."""
        times = times or SampleTimes()
        times.until(WORKER)
        made = self._sent(method, episode, deadline_s, **given)
        took_s: float | None = None
        try:
            answer = await asyncio.wrap_future(made.future)
            took_s = answer.took_s
        except PlaceLostError:
            took_s = 0.0
            raise
        finally:
            if made.answered_s is not None and took_s is not None:
                times.until(PROCESS, made.answered_s - took_s)
            times.until(ENVIRONMENT, made.answered_s)
        if answer.error is not None:
            if not answer.is_loaded:
                raise StageError(not_loaded(*answer.error))
            raise EnvironmentFailedError(method, *answer.error)
        return answer

    def start(self, method: str, episode: int, deadline_s: float, **given: Any) -> Future[SentAnswer]:
        """Call a method as `ask` does, without waiting for its answer."""
        return self._sent(method, episode, deadline_s, **given).future

    def kill(self) -> None:
        """End the process that is for one episode alone."""
        if self._own:
            self._sent("kill", self._episode, 0.0)

    def _sent(self, method: str, episode: int, deadline_s: float, **given: Any) -> _OpenCall:
        self._episode = episode
        call = {"method": method, "episode": episode, "deadline_s": deadline_s, "own": self._own, **given}
        return self._link.send(call)


class ServedEnvironments:
    """The workers of a group that serve this environment. `first` is the one that is asked first, of several with as
    many episodes: other sampling workers begin with others."""

    def __init__(self, environment: Environment, addresses: Sequence[ServerAddress], *, first: int) -> None:
        self.closes = type(environment).close is not Environment.close
        self.addresses, self._first = addresses, first
        self._episodes = itertools.count()
        self._lock = threading.Lock()
        self.loop = LoopThread("environments")
        self._links = [Link(self, at, is_doubtful=False) for at in range(len(addresses))]

    def number(self) -> int:
        """A number for the next episode."""
        return next(self._episodes)

    def place(self) -> ServedPlace:
        """A place at the worker with the fewest episodes, of those that can be reached."""
        return ServedPlace(self._link(), own=False)

    def fresh(self) -> ServedPlace:
        """A process for one episode alone, whose owner kills it."""
        return ServedPlace(self._link(), own=True)

    def close(self) -> None:
        """End the connections."""
        self.loop.close()

    def _link(self) -> Link:
        with self._lock:
            for at, link in enumerate(self._links):
                if link.is_lost:
                    self._links[at] = Link(self, at, is_doubtful=True)
            links = [*self._links[self._first % len(self._links) :], *self._links[: self._first % len(self._links)]]
            return min(links, key=lambda link: (link.is_doubtful, len(link.episodes)))
