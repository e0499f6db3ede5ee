"""A stream of requests that vLLM runs, and the results for its reader, in the loop of their reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from stages.backends.vllm.requests import Lot, Request

if TYPE_CHECKING:
    from stages.backends.vllm.client import Client

LOOK_S = 0.05  # between two looks for lots that nobody wants, and at an engine that may be silent


class RunningRequests:
    """Requests that were submitted together, in lots of `size`; lots are returned in completion order, by their number.

    Its reader waits for `ended`, which the thread of the client wakes. `unwanted` says whether a lot is to be given up.
    `look` has to be called now and then, and `close` at the end; `RunningStreams` does both.
    """

    def __init__(self, client: Client, requests: Sequence[Request], size: int, unwanted: Callable[[int], bool]) -> None:
        self._client, self._unwanted = client, unwanted
        self._lots = [requests[start : start + size] for start in range(0, len(requests), size)]
        self.open, self.given_up = set(range(len(self._lots))), set[int]()
        self._made: deque[int | BaseException] = deque()
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._future = client.start(self._all())

    async def ended(self) -> dict[int, Lot]:
        """The lots that have ended since the last call; waits for one. Raises a request's error, and StageError if the
        engine has been silent for too long."""
        await self._news.wait()
        self._news.clear()
        found = {}
        while self._made:
            made = self._made.popleft()
            if isinstance(made, BaseException):
                raise made
            found[made] = self._lots[made]
        self.open -= found.keys()
        return found

    def look(self) -> None:
        """Abort the lots that nobody wants; they are returned with the tokens sampled so far."""
        try:
            self._client.check()
            if unwanted := {lot for lot in self.open - self.given_up if self._unwanted(lot)}:
                self.given_up |= unwanted
                lots = [self._lots[lot] for lot in sorted(unwanted)]
                self._client.start(self._client.end([request for lot in lots for request in lot]))
        except Exception as error:  # noqa: BLE001  # raised where the lots are awaited
            self._add(error)

    def close(self) -> None:
        """Stop; requests still running are aborted."""
        self._future.cancel()

    async def _all(self) -> None:
        await asyncio.gather(*(self._one(lot) for lot in range(len(self._lots))))

    async def _one(self, lot: int) -> None:
        made: int | BaseException = lot
        try:
            await self._client.sample(self._lots[lot])
        except Exception as error:  # noqa: BLE001  # raised where the lots are awaited
            made = error
        with suppress(RuntimeError):  # the reader's loop has ended
            self._loop.call_soon_threadsafe(self._add, made)

    def _add(self, made: int | BaseException) -> None:
        self._made.append(made)
        self._news.set()


class RunningStreams:
    """The streams of an engine. However many they are, one timer of their loop looks at all of them."""

    def __init__(self) -> None:
        self._watched: dict[asyncio.AbstractEventLoop, _LoopWatch] = {}

    @contextmanager
    def of(
        self, client: Client, requests: Sequence[Request], size: int, unwanted: Callable[[int], bool]
    ) -> Iterator[RunningRequests]:
        """Run requests until the context ends."""
        running, loop = RunningRequests(client, requests, size, unwanted), asyncio.get_running_loop()
        watched = self._watched.setdefault(loop, _LoopWatch(loop))
        watched.add(running)
        try:
            yield running
        finally:
            running.close()
            watched.remove(running)
            if not watched.running:
                self._watched.pop(loop, None)


class _LoopWatch:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.running = loop, set[RunningRequests]()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, running: RunningRequests) -> None:
        self.running.add(running)
        running.look()
        self._timer = self._timer or self._loop.call_later(LOOK_S, self._look)

    def remove(self, running: RunningRequests) -> None:
        self.running.discard(running)
        if not self.running and self._timer:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        for running in self.running:
            running.look()
        self._timer = self._loop.call_later(LOOK_S, self._look)
