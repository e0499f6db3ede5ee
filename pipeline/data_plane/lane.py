"""Group commit: calls that come from any thread while a batch of them is under way go out together in the next batch.

    lane = Lane(loop, run, deadline_s=30)        # async def run(calls): answers or fails every one of them
    lane.submit(call)                            # from any thread
    call.done.result(30)                         # a concurrent future: waits in the caller's thread

A burst of n small calls so takes the round trips of two instead of n. A call that comes alone goes out at once; only
after a batch of several does the lane wait half a millisecond for their callers to come again, so that a few threads
that put one after the other share every batch instead of every second one. One batch at a time, in order of arrival.
Knows no store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Generic, TypeVar

LINGER_S = 0.0005


class Call:
    """One call in a batch. Whoever runs the batch answers it or fails it, once; what comes later is ignored."""

    def __init__(self) -> None:
        self.done: Future[Any] = Future()

    def answer(self, result: Any = None) -> None:
        """Give the caller its result."""
        with suppress(InvalidStateError):
            self.done.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the caller."""
        with suppress(InvalidStateError):
            self.done.set_exception(error)


C = TypeVar("C", bound=Call)


async def contained(calls: Sequence[Call], work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """Do `work` for `calls`. What it raises is told to those of them that have no answer yet, and to nobody else."""
    try:
        await work(*arguments)
    except Exception as error:  # noqa: BLE001 - handed to the callers' threads, whatever it is
        for call in calls:
            call.fail(error)


class Lane(Generic[C]):
    """Batches of calls on `loop`, one at a time. A batch ends after `deadline_s` with TimeoutError for its callers."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, run: Callable[[list[C]], Awaitable[None]], deadline_s: float
    ) -> None:
        self._loop, self._run, self._deadline_s = loop, run, deadline_s
        self._lock = threading.Lock()
        self._waiting: list[C] = []
        self._under_way: list[C] = []
        self._working = False
        self._work_done: Future[None] | None = None  # kept, because a loop does not keep its tasks
        self._over: BaseException | None = None

    def submit(self, call: C) -> None:
        """Send the call with the next batch, which starts now where none is under way."""
        with self._lock:
            if self._over is not None:
                return call.fail(self._over)
            self._waiting.append(call)
            start, self._working = not self._working, True
        if start:
            self._work_done = asyncio.run_coroutine_threadsafe(self._work(), self._loop)

    def fail(self, error: BaseException) -> None:
        """Raise `error` in every caller that still waits and in all that come: no batch will run any more."""
        with self._lock:
            self._over = error
            calls, self._waiting = [*self._under_way, *self._waiting], []
        for call in calls:
            call.fail(error)

    async def _work(self) -> None:
        while batch := self._take():
            await contained(batch, self._run_within, batch)
            if len(self._waiting) < len(batch) > 1:  # callers that put one after the other are about to come again
                await asyncio.sleep(LINGER_S)

    async def _run_within(self, batch: list[C]) -> None:
        async with asyncio.timeout(self._deadline_s):
            await self._run(batch)

    def _take(self) -> list[C]:
        """The calls that wait and that no caller has given up; the lane rests where there are none."""
        with self._lock:
            self._under_way = [call for call in self._waiting if call.done.set_running_or_notify_cancel()]
            self._waiting = []
            self._working = bool(self._under_way)
            return self._under_way
