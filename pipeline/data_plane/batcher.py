"""Group commit: calls that arrive from any thread during a batch are sent together in the next one.

    batcher = Batcher(loop, run, deadline_s=30)  # async def run(calls): resolves or fails every call
    batcher.submit(call)                         # from any thread
    call.done.result(30)                         # a concurrent future: waits in the caller's thread

A burst of n small calls thus takes two round trips instead of n. A single call is sent at once. After a batch of
several, the batcher waits half a millisecond for their callers to return, so that threads that put in a loop share
every batch instead of every second one. One batch at a time, in order of arrival. Knows no store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import chain
from typing import Any, Generic, TypeVar

LINGER_S = 0.0005


class PlaneCall:
    """One call in a batch. The batch runner resolves or fails it once; later results are ignored."""

    def __init__(self) -> None:
        self.done: Future[Any] = Future()

    def answer(self, result: Any = None) -> None:
        """Resolve the call."""
        with suppress(InvalidStateError):
            self.done.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Fail the call with `error`."""
        with suppress(InvalidStateError):
            self.done.set_exception(error)


C = TypeVar("C", bound=PlaneCall)


async def contained(calls: Sequence[PlaneCall], work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """Run `work` for `calls`. If it raises, the calls that are not resolved yet fail with its exception."""
    try:
        await work(*arguments)
    except Exception as error:  # noqa: BLE001 - passed to the callers' threads
        for call in calls:
            call.fail(error)


class Batcher(Generic[C]):
    """Runs batches of calls on `loop`, one at a time. A batch that takes `deadline_s` fails with TimeoutError."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, run: Callable[[list[C]], Awaitable[None]], deadline_s: float
    ) -> None:
        self._loop, self._run, self._deadline_s = loop, run, deadline_s
        self._lock = threading.Lock()
        self._waiting: list[Sequence[C]] = []  # by caller
        self._under_way: list[C] = []
        self._callers = 0  # of the calls under way
        self._working = False
        self._work_done: Future[None] | None = None  # keep a reference: a loop does not
        self._over: BaseException | None = None

    def submit(self, *calls: C) -> None:
        """Add the calls of one caller to the next batch, which starts now if none is running."""
        with self._lock:
            if self._over is None:
                self._waiting.append(calls)
                start, self._working = not self._working, True
        if self._over is not None:
            for call in calls:
                call.fail(self._over)
        elif start:
            self._work_done = asyncio.run_coroutine_threadsafe(self._work(), self._loop)

    def fail(self, error: BaseException) -> None:
        """Fail all pending and future calls with `error`; no further batch runs."""
        with self._lock:
            self._over = error
            calls, self._waiting = [*self._under_way, *chain.from_iterable(self._waiting)], []
        for call in calls:
            call.fail(error)

    async def _work(self) -> None:
        while batch := self._take():
            await contained(batch, self._run_within, batch)
            if len(self._waiting) < self._callers > 1:  # callers that put in a loop are about to call again
                await asyncio.sleep(LINGER_S)

    async def _run_within(self, batch: list[C]) -> None:
        async with asyncio.timeout(self._deadline_s):
            await self._run(batch)

    def _take(self) -> list[C]:
        """Return the pending calls that were not canceled; the batcher becomes idle if there are none."""
        with self._lock:
            waiting, self._waiting, self._callers = self._waiting, [], len(self._waiting)
            self._under_way = [c for calls in waiting for c in calls if c.done.set_running_or_notify_cancel()]
            self._working = bool(self._under_way)
            return self._under_way
