"""Lets two processes that have the same key find out that they do, before they say anything else on a connection.

Each proves it with the other's challenge, so the key itself is never sent. What is said later is neither signed nor
secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from typing import Any

SIZE = 32  # bytes of keys, challenges and proofs
ADMISSION_S = 10.0
SILENT_S, ASKS_S, ASKS = 10, 5, 3  # of a connection, until the kernel asks whether the other machine is there


def new_key() -> bytes:
    """Return a key that nobody knows."""
    return secrets.token_bytes(SIZE)


async def admits(key: bytes, reader: StreamReader, writer: StreamWriter) -> bool:
    """Return whether the other side knows the key, and prove that this process does."""
    ours = secrets.token_bytes(SIZE)
    writer.write(ours)
    theirs, proof = await _read(reader), await _read(reader)
    if not hmac.compare_digest(proof, _proof(key, b"client", ours + theirs)):
        return False
    writer.write(_proof(key, b"server", ours + theirs))
    return True


async def enter(key: bytes, reader: StreamReader, writer: StreamWriter) -> None:
    """Prove to the other side that this process knows the key. Raises ConnectionError if that side does not."""
    ours, theirs = secrets.token_bytes(SIZE), await _read(reader)
    writer.write(ours + _proof(key, b"client", theirs + ours))
    if not hmac.compare_digest(await _read(reader), _proof(key, b"server", theirs + ours)):
        raise ConnectionError("it has another key")


def keep_alive(writer: StreamWriter) -> None:
    """Let a connection end if the other machine is gone, though nothing is sent."""
    connection: Any = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENT_S),
        (socket.TCP_KEEPINTVL, ASKS_S),
        (socket.TCP_KEEPCNT, ASKS),
        (socket.TCP_USER_TIMEOUT, 1000 * (SILENT_S + ASKS * ASKS_S)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def _read(reader: StreamReader) -> bytes:
    async with asyncio.timeout(ADMISSION_S):
        return await reader.readexactly(SIZE)


def _proof(key: bytes, whose: bytes, challenges: bytes) -> bytes:
    return hashlib.blake2b(whose + challenges, key=key, digest_size=SIZE).digest()
