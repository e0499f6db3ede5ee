"""Samples on their way through an engine, from one thread to another. Knows no engine and no model."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.backends.vllm.client import Client
    from stages.backends.vllm.versions import AsyncLLM


@dataclass(eq=False, kw_only=True)
class Request:
    """A sample on its way. `spans` are pairs (first token, version); None is the weights of the folder."""

    position: int
    name: str
    prompt: Sequence[int]
    params: Any
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str | None = None
    unwanted: bool = False
    llm: AsyncLLM | None = None
    following: asyncio.Task[None] | None = None
    spans: list[tuple[int, int | None]] = field(default_factory=list)

    def versions(self) -> list[int | None]:
        """One a token."""
        made: list[int | None] = []
        for start, version in self.spans:
            made[start:] = [version] * (len(self.tokens) - start)
        return made


class Running:
    """Requests that were handed in together; those that have ended come out in the order in which they end."""

    def __init__(self, client: Client, requests: Sequence[Request]) -> None:
        self._client, self._requests = client, {request.position: request for request in requests}
        self._ended: queue.SimpleQueue[Request | BaseException] = queue.SimpleQueue()
        self._future = client.start(self._all())

    def take(self, wait_s: float) -> list[Request]:
        """The requests that ended since the last call, after waiting for one at most that long.

        Raises what a request failed with, and StageError where the engine has been silent for too long.
        """
        self._client.check()
        found: list[Request] = []
        if wait_s and self._ended.empty():
            with suppress(queue.Empty):
                self._keep(found, self._ended.get(timeout=wait_s))
        while not self._ended.empty():
            self._keep(found, self._ended.get())
        return found

    def give_up(self, positions: Sequence[int]) -> None:
        """End these requests where they are; they come out as they are then."""
        self._client.start(self._client.end([self._requests[position] for position in positions]))

    def close(self) -> None:
        """End all that run still."""
        self._future.cancel()

    def _keep(self, found: list[Request], item: Request | BaseException) -> None:
        if isinstance(item, BaseException):
            raise item
        found.append(item)

    async def _all(self) -> None:
        await asyncio.gather(*(self._one(request) for request in self._requests.values()))

    async def _one(self, request: Request) -> None:
        try:
            await self._client.sample(request)
        except Exception as error:  # noqa: BLE001  # it belongs to the thread that waits
            self._ended.put(error)
        else:
            self._ended.put(request)
