"""An event loop in a thread of its own, for what must go on whatever the worker does.

loop = LoopThread("environments")
loop.run(coroutine()).result()
loop.close()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

CLOSE_S = 5.0


class LoopThread:
    """A loop that runs until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock, self._is_closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=name)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop. Returns its concurrent future, which is cancelled if the loop is closed."""
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        unwanted: Future[Any] = Future()
        unwanted.cancel()
        return unwanted

    def soon(self, function: Callable[..., None], *given: Any) -> None:
        """Call a function in the loop, unless that is closed."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(function, *given)

    def close(self) -> None:
        """Cancel what still runs in the loop, and end it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True  # so nothing comes after what is cancelled
            cancelled = asyncio.run_coroutine_threadsafe(_cancelled(), self._loop)
        with suppress(TimeoutError):
            cancelled.result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancelled() -> None:
    """Cancel the other tasks of this loop, and those that they begin meanwhile, and wait until they have ended."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
