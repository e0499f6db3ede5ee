"""Sends the requests that are made in the same turn of a loop in one message.

    messages = SharedMessages(send)  # async def send(requests): one message; returns the answers, in order
    await messages.ask(request)      # in several tasks: one message

A put of fields with several lifetimes takes the messages of one. Knows no store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any


class SharedMessages:
    """Collects requests on one loop. The requests of a message that the store refuses are sent again one by one, so
    that a refused request harms no other; they must be idempotent. A message that nobody waits for is canceled."""

    def __init__(self, send: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]) -> None:
        self._send = send
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._under_way: set[asyncio.Task[None]] = set()  # keep references: a loop does not

    async def ask(self, request: Any) -> Any:
        """Return the answer to a request. Raises RuntimeError if the store refuses it, LookupError if it lacks it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((request, answer))
        return await answer

    def _flush(self) -> None:
        batch, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._deliver(batch))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

        wanted = len(batch)

        def look(answer: asyncio.Future[Any]) -> None:
            nonlocal wanted
            wanted -= answer.cancelled()
            if not wanted:
                task.cancel()

        for _, answer in batch:
            answer.add_done_callback(look)

    async def _deliver(self, batch: Sequence[tuple[Any, asyncio.Future[Any]]]) -> None:
        wanted = [(request, answer) for request, answer in batch if not answer.done()]
        try:
            found = await self._send([request for request, _ in wanted]) if wanted else []
        except (RuntimeError, LookupError) as error:
            if len(wanted) == 1:
                _fail(wanted, error)
            else:
                await asyncio.gather(*(self._deliver([one]) for one in wanted))
        except asyncio.CancelledError:
            for _, answer in wanted:
                answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - passed to the callers
            _fail(wanted, error)
        else:
            for (_, answer), value in zip(wanted, found, strict=True):
                if not answer.done():
                    answer.set_result(value)


def _fail(batch: Sequence[tuple[Any, asyncio.Future[Any]]], error: BaseException) -> None:
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(error)
