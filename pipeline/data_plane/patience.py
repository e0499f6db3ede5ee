"""How long a caller waits for a store in other processes: not at all for one that is gone, long for one that is slow.

A process that is gone refuses a connection, which every look between two parts of the wait finds out. One that is there
may be short of processors, or its answer was lost: a request is asked again on a connection of its own. A caller counts
its wait in looks, so one that was stopped itself for less than a deadline finds nobody late. Knows addresses; knows no
store.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

LOOKS = 30  # in a deadline
ASKED = 3  # times within a deadline
CONNECT_S = 1.0
T = TypeVar("T")


class StoreGoneError(ConnectionError):
    """A process of the store is not there; the message is its name."""


class Patience:
    """Of one caller with the processes behind `addresses` (name -> host, port), `deadline_s` a call."""

    def __init__(self, addresses: Mapping[str, tuple[str, int]], deadline_s: float) -> None:
        self._addresses, self.deadline_s = dict(addresses), deadline_s

    def wait(self, future: Future[T]) -> T:
        """The future's result. Raises StoreGoneError soon after a process has gone, TimeoutError at the deadline."""
        for _ in range(LOOKS):
            try:
                return future.result(self.deadline_s / LOOKS)
            except TimeoutError:
                if future.done():  # it came meanwhile, or is a TimeoutError of its own
                    return future.result()
                self._look()
        raise TimeoutError

    async def ask(self, request: Callable[[], Awaitable[T]]) -> T:
        """What `request` answers, which is made again where nothing came. Only for what may be done twice.

        The last time it waits without bound: whoever waits for this ends it at the deadline.
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
                pass  # neither there nor gone: the deadline decides
