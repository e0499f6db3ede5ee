"""Decides how long to wait for a store in other processes: not at all for a dead one, long for a slow one.

A dead process refuses connections, which the polls between waits detect. A live one may be short of CPU, or its reply
was lost: the request is retried on a new connection. Waiting is counted in polls, so a caller that was itself suspended
for less than a deadline does not time out. Knows addresses, no store.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

LOOKS = 30  # polls per deadline
ASKED = 3  # tries per deadline
CONNECT_S = 1.0
T = TypeVar("T")


class StoreGoneError(ConnectionError):
    """A process of the store is gone; the message is its name."""


class Patience:
    """One caller's waits on the processes at `addresses` (name -> host, port), `deadline_s` per call."""

    def __init__(self, addresses: Mapping[str, tuple[str, int]], deadline_s: float) -> None:
        self._addresses, self.deadline_s = dict(addresses), deadline_s

    def wait(self, future: Future[T]) -> T:
        """Return the future's result. Raises StoreGoneError soon after a process died, TimeoutError at the deadline."""
        for _ in range(LOOKS):
            try:
                return future.result(self.deadline_s / LOOKS)
            except TimeoutError:
                if future.done():  # it arrived meanwhile, or raised its own TimeoutError
                    return future.result()
                self._look()
        raise TimeoutError

    async def ask(self, request: Callable[[], Awaitable[T]]) -> T:
        """Return the reply to `request`, which is retried if none arrives. Only for idempotent requests.

        The last try has no time limit; the caller cancels it at the deadline.
        """
        for _ in range(ASKED - 1):
            try:
                async with asyncio.timeout(self.deadline_s / ASKED):
                    return await request()
            except TimeoutError:
                pass
        return await request()

    def _look(self) -> None:
        for name, address in self._addresses.items():
            try:
                socket.create_connection(address, timeout=CONNECT_S).close()
            except ConnectionRefusedError as error:
                raise StoreGoneError(name) from error
            except OSError:
                pass  # neither alive nor dead: the deadline decides
