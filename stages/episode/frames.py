"""What an episode's worker and the processes of its environments say to each other: messages in frames on a socket.
If these are of a worker group, its worker stands between the two.

A frame is four bytes with the length of what follows, a message in msgpack.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from pipeline.errors import message_of
from stages.episode.environment import End, Messages, Reply, Said

HEAD = struct.Struct("<I")
T = TypeVar("T")


class Opening(msgspec.Struct, frozen=True):
    """The first frame: the environment, pickled, and the folders where its modules are."""

    environment: bytes
    path: list[str]


class HostCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a method for an episode: `row` and `seed` of `open`, `reply` of `turn`."""

    number: int
    episode: int
    method: str
    row: dict[str, Any] = {}
    seed: tuple[int, ...] = ()
    reply: Reply | None = None


class HostAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the method returned: what is said next (`said`), with the most tokens of the next turn (0: no limit) and,
    of `open`, the tools of this episode; or the `end`; or the `error` that it raised, the name of its class and its
    text."""

    number: int
    said: Said | None = None
    tools: list[dict[str, Any]] = []
    most: int = 0
    end: str = ""
    reward: float = 0.0
    error: tuple[str, str] | None = None

    @property
    def returned(self) -> Messages | End:
        """The result of `turn`."""
        return End(self.end, self.reward) if self.said is None else Messages(self.said, self.reward)


class SentCall(HostCall, frozen=True, kw_only=True):
    """A call that goes to another worker first, which enforces the deadline. `own`: in a process for this episode
    alone, which the method "kill" ends."""

    deadline_s: float
    own: bool = False


class SentAnswer(HostAnswer, frozen=True, kw_only=True):
    """The answer to it, with the seconds that the environment took. `is_loaded`: the error is one of the environment,
    and not that its process could not load it."""

    took_s: float = 0.0
    is_loaded: bool = True


class UnsendableError(ValueError):
    """A message has a value that msgpack has no form for: a whole number of more than 64 bits, a character that is half
    of a pair, a list in thousands of lists."""


def framed(message: msgspec.Struct) -> bytes:
    """Return a message as a frame. Raises UnsendableError."""
    content = packed(message)
    return HEAD.pack(len(content)) + content


def packed(value: Any) -> bytes:
    """Return a value in msgpack. Raises UnsendableError."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeError, RecursionError) as error:
        raise UnsendableError(message_of(error)) from error


def send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Send a message. Raises UnsendableError."""
    send_frame(writer, framed(message))


def send_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Send a frame, unless the connection has ended, which who reads from it finds out."""
    if not writer.is_closing():
        writer.write(frame)


def close_stream(writer: asyncio.StreamWriter) -> None:
    """Close a connection, in its loop. If the other end has reset it, that is no error: unseen, it may be reported when
    its objects are collected, in the middle of anything."""
    writer.close()
    asyncio.ensure_future(_closed(writer))  # noqa: RUF006 - its connection holds it


async def _closed(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        await writer.wait_closed()


async def frames(reader: asyncio.StreamReader, kind: Any) -> AsyncIterator[Any]:
    """Yield the messages, of this type, that come from the other end, until it closes the connection."""
    with suppress(asyncio.IncompleteReadError, OSError):
        while True:
            (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
            yield msgspec.msgpack.decode(await reader.readexactly(size), type=kind)


def unframed(content: bytes, kind: type[T]) -> list[T]:
    """Return the messages, of this type, of a file of frames. What ends within a frame was being written."""
    found, at = [], 0
    while at + HEAD.size <= len(content):
        start = at + HEAD.size
        at = start + HEAD.unpack_from(content, at)[0]
        if at <= len(content):
            found.append(msgspec.msgpack.decode(content[start:at], type=kind))
    return found


def read_frame(connection: socket.socket) -> bytes | None:
    """Return the content of the next frame; None at the end of the connection."""
    head = _exactly(connection, HEAD.size)
    return None if head is None else _exactly(connection, HEAD.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
