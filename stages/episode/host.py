"""A process of environments: python -m stages.episode.host FD. Knows one environment and a socket; loads no torch.

Coroutines run in one event loop, other methods one after the other, in a thread of their own if there are coroutines.
Ends, with all processes that it has started, when the other end of the socket is closed: when the run has ended or was
killed.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any

import msgspec

from pipeline.errors import message_of
from stages.episode import children
from stages.episode.environment import METHODS, End, Environment, Messages, plain_methods
from stages.episode.frames import HostAnswer, HostCall, Opening, UnsendableError, framed, read_frame
from stages.vocabulary import FAILED, LOST

MOST_BYTES = 4 << 20  # of an answer: more than any model sees, and little enough to be tokenized at once
LARGEST = 3.4028234663852886e38  # of float32, which rewards are
READY, NOT_LOADED = -1, -2  # the numbers of the first answer: the environment is loaded, or cannot be


class Host:
    """Calls the environment for the other end of the connection."""

    def __init__(self, environment: Environment, connection: socket.socket) -> None:
        self._environment, self._connection = environment, connection
        self._loop = asyncio.new_event_loop()
        self._apart = ThreadPoolExecutor(1) if len(plain_methods(environment)) < len(METHODS) else None
        self._states: dict[int, Any] = {}
        self._running: dict[int, tuple[str, asyncio.Task[None]]] = {}  # by episode: a method, and its call

    def serve(self) -> None:
        """Answer until the connection ends, which ends the process."""
        threading.Thread(target=self._read, daemon=True).start()
        self._loop.run_forever()

    def _read(self) -> None:
        try:
            while (content := read_frame(self._connection)) is not None:
                self._loop.call_soon_threadsafe(self._start, msgspec.msgpack.decode(content, type=HostCall))
        finally:
            children.kill(os.getpgrp())  # what the environments started, and this process

    def _start(self, asked: HostCall) -> None:
        """Answer a call. One that its episode has made before, and that is not answered yet, is not wanted any more."""
        unwanted = self._running.get(asked.episode)
        task = self._loop.create_task(self._answer(asked, unwanted))
        self._running[asked.episode] = asked.method, task
        task.add_done_callback(lambda _: self._forget(asked.episode, task))

    def _forget(self, episode: int, task: asyncio.Task[None]) -> None:
        if self._running[episode][1] is task:
            del self._running[episode]

    async def _answer(self, asked: HostCall, unwanted: tuple[str, asyncio.Task[None]] | None) -> None:
        try:
            if unwanted is not None:
                method, call = unwanted
                if inspect.iscoroutinefunction(getattr(self._environment, method)):
                    call.cancel()
                await asyncio.wait({call})
            answer = framed(await self._called(asked))
            if len(answer) > MOST_BYTES:
                raise ValueError(f"{asked.method}() returned {len(answer):,} bytes; at most {MOST_BYTES:,} can be said")
        except BaseException as error:  # noqa: BLE001 - the user's
            answer = framed(HostAnswer(number=asked.number, error=_said_of(error)))
        _send(self._connection, answer)

    async def _called(self, asked: HostCall) -> HostAnswer:
        if asked.method == "open":
            made = await self._call("open", asked.row, Random(repr(asked.seed)))
            if not (isinstance(made, tuple) and len(made) == 2 and is_said(made[1])):
                raise TypeError(f"open() returned {made!r:.100}; it returns a state, and a text or messages")
            self._states[asked.episode], said = made
            return HostAnswer(number=asked.number, said=said)
        if asked.method == "close":
            if asked.episode in self._states:
                await self._call("close", self._states.pop(asked.episode))
            return HostAnswer(number=asked.number)
        made = await self._call("turn", self._states[asked.episode], asked.reply)
        if isinstance(made, Messages) and is_said(made.said):
            return HostAnswer(number=asked.number, said=made.said, reward=finite(made.reward))
        if isinstance(made, End) and is_end(made.kind):
            return HostAnswer(number=asked.number, end=made.kind, reward=finite(made.reward))
        raise TypeError(f"turn() returned {made!r:.100}; it returns Messages or End, not of a kind that is ours")

    async def _call(self, method: str, *given: Any) -> Any:
        function = getattr(self._environment, method)
        if inspect.iscoroutinefunction(function):
            return await function(*given)
        if self._apart is None:  # nothing else runs meanwhile
            return function(*given)
        return await self._loop.run_in_executor(self._apart, function, *given)


def _send(connection: socket.socket, answer: bytes) -> None:
    """Answer, if the connection has not ended, which ends this process."""
    with suppress(OSError):
        connection.sendall(answer)


def is_end(kind: object) -> bool:
    """Return whether this may be how an environment says that an episode ended: a word, and none of ours."""
    return isinstance(kind, str) and bool(kind) and not kind.startswith((LOST, FAILED))


def finite(reward: Any) -> float:
    """Return the reward of a turn. Raises ValueError if it is no finite number of float32."""
    try:
        number = float(reward)
    except OverflowError:  # a whole number
        number = math.inf
    if not abs(number) <= LARGEST:
        raise ValueError(f"the reward is {number:g}, and not a finite number of float32")
    return number


def _said_of(error: BaseException) -> tuple[str, str]:
    """The class and the text of an error, as they can be sent."""
    kind = "unsendable" if isinstance(error, UnsendableError) else type(error).__name__
    name, text = (said.encode(errors="backslashreplace").decode() for said in (kind, message_of(error)))
    return name, text


def is_said(value: Any) -> bool:
    """Return whether this is a text, or messages of a chat."""
    if isinstance(value, str):
        return True
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in value)
    )


def main() -> None:
    """Load the environment that the first frame has, and serve it."""
    children.adopt()
    connection = socket.socket(fileno=int(sys.argv[1]))
    content = read_frame(connection)
    if content is None:
        return
    opening = msgspec.msgpack.decode(content, type=Opening)
    sys.path.extend(folder for folder in opening.path if folder not in sys.path)
    try:
        import cloudpickle

        environment = cloudpickle.loads(opening.environment)
    except BaseException as error:  # noqa: BLE001 - the user's
        answer = HostAnswer(number=NOT_LOADED, error=_said_of(error))
        _send(connection, framed(answer))
        return
    _send(connection, framed(HostAnswer(number=READY)))
    Host(environment, connection).serve()


if __name__ == "__main__":
    main()
