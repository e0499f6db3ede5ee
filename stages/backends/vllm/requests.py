"""Samples on their way through an engine, from one thread to another. Knows no engine and no model."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

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
    logprobs: np.ndarray | None = None  # float32, one a token; none where it was aborted
    ended: str | None = None
    unwanted: bool = False
    llm: AsyncLLM | None = None
    following: asyncio.Task[None] | None = None
    spans: list[tuple[int, int | None]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether it came to its own end."""
        return self.ended not in (None, "abort")

    def versions(self) -> list[int | None]:
        """One a token."""
        made: list[int | None] = []
        for start, version in self.spans:
            made[start:] = [version] * (len(self.tokens) - start)
        return made


Lot = Sequence[Request]


class Running:
    """Requests that were handed in together, in lots of `size`; lots come out in the order in which they are whole."""

    def __init__(self, client: Client, requests: Sequence[Request], size: int) -> None:
        self._client, self._requests = client, requests
        self._lots = [requests[start : start + size] for start in range(0, len(requests), size)]
        self._ended: queue.SimpleQueue[Lot | BaseException] = queue.SimpleQueue()
        self._future = client.start(self._all())

    def take(self, wait_s: float) -> list[Lot]:
        """The lots that ended since the last call, after waiting for one at most that long.

        Raises what a request failed with, and StageError where the engine has been silent for too long.
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
        """End these requests where they are; they come out as they are then."""
        self._client.start(self._client.end([self._requests[position] for position in positions]))

    def close(self) -> None:
        """End all that run still."""
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
        except Exception as error:  # noqa: BLE001  # it belongs to the thread that waits
            self._ended.put(error)
        else:
            self._ended.put(lot)
