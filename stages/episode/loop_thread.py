"""An event loop in a thread of its own, for what must go on whatever the worker does.

loop = LoopThread("environments")
loop.run(coroutine()).result()
loop.close()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

CLOSE_S = 5.0


class LoopThread:
    """A loop that runs until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=name)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop. Returns its concurrent future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, function: Callable[..., None], *given: Any) -> None:
        """Call a function in the loop."""
        self._loop.call_soon_threadsafe(function, *given)

    def close(self) -> None:
        """Cancel what still runs in the loop, and end it."""
        with suppress(TimeoutError):
            self.run(_cancelled()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancelled() -> None:
    """Cancel the other tasks of this loop, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
