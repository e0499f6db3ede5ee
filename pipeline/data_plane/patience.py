"""Decides how long to wait for a store in other processes: not at all for a dead one, long for a slow one.

A dead process refuses connections, which the polls between waits detect. A live one may be short of CPU, or its reply
was lost: the request is retried on a new connection. Waiting is counted in polls, so a caller that was itself suspended
for less than a deadline does not time out. Calls without a deadline of their own run `in_thread`. Knows addresses, no
store.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

LOOKS = 30  # polls per deadline
ASKED = 3  # tries per deadline
CONNECT_S = 1.0
LOOK_S = 1.0
T = TypeVar("T")


class StoreGoneError(ConnectionError):
    """A process of the store is gone; the message is its name."""


class AbandonedError(Exception):
    """Blocking code has not ended by its deadline; its thread was left behind."""


def in_thread(work: Callable[[], T], deadline_s: float, name: str, look: Callable[[], None] | None = None) -> T:
    """Run blocking code in a thread and return its result. Raises what it raises, and AbandonedError at the deadline:
    a call into a stopped process may never return. `look` is called every second meanwhile, and ends the wait if it
    raises."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - passed to the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name=name)
    thread.start()
    ends_s = time.monotonic() + deadline_s
    while thread.is_alive() and (left_s := ends_s - time.monotonic()) > 0:
        thread.join(min(left_s, LOOK_S) if look else left_s)
        if look and thread.is_alive():
            look()
    if failed:
        raise failed[0]
    if not done:
        raise AbandonedError
    return done[0]


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
                self.look()
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

    def look(self) -> None:
        """Raise StoreGoneError if a process of the store refuses connections, so it has ended."""
        for name, address in self._addresses.items():
            try:
                socket.create_connection(address, timeout=CONNECT_S).close()
            except ConnectionRefusedError as error:
                raise StoreGoneError(name) from error
            except OSError:
                pass  # neither alive nor dead: the deadline decides
