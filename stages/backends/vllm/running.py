"""A stream of requests that vLLM runs, and the results for its reader."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from stages.backends.vllm.requests import Lot, Request

if TYPE_CHECKING:
    from stages.backends.vllm.client import Client


class RunningRequests:
    """Requests that were submitted together, in lots of `size`; lots are returned in completion order."""

    def __init__(self, client: Client, requests: Sequence[Request], size: int) -> None:
        self._client, self._requests = client, requests
        self._lots = [requests[start : start + size] for start in range(0, len(requests), size)]
        self._ended: queue.SimpleQueue[Lot | BaseException] = queue.SimpleQueue()
        self._future = client.start(self._all())

    def take(self, wait_s: float) -> list[Lot]:
        """The lots finished since the last call; waits up to `wait_s` for one.

        Raises a request's error, and StageError if the engine has been silent for too long.
        """
        self._client.check()
        found: list[Lot] = []
        if wait_s and self._ended.empty():
            with suppress(queue.Empty):
                self._keep(found, self._ended.get(timeout=wait_s))
        while not self._ended.empty():
            self._keep(found, self._ended.get())
        return found

    def give_up(self, positions: Sequence[int]) -> None:
        """Abort these requests; they are returned with the tokens sampled so far."""
        self._client.start(self._client.end([self._requests[position] for position in positions]))

    def close(self) -> None:
        """Stop; requests still running are aborted."""
        self._future.cancel()

    def _keep(self, found: list[Lot], item: Lot | BaseException) -> None:
        if isinstance(item, BaseException):
            raise item
        found.append(item)

    async def _all(self) -> None:
        await asyncio.gather(*(self._one(lot) for lot in self._lots))

    async def _one(self, lot: Lot) -> None:
        try:
            await self._client.sample(lot)
        except Exception as error:  # noqa: BLE001  # raised in the waiting thread
            self._ended.put(error)
        else:
            self._ended.put(lot)
