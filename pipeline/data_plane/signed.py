"""Signs TransferQueue's messages with a key of the run: its sockets unpickle what they receive, and any local user, or
with `--trusted-network` any machine, can connect to them. A message without the signature is refused unread.

The signature covers what is unpickled (the header; without a header, everything) and the size of every frame, not the
bytes of tensors: to exchange those takes someone who can change packets in transit. The key travels through Ray, which
asks for the token of the run.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

KEY_BYTES = 32
_UNSIGNED: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # of the message class, as it came


def signature(key: bytes, frames: list[Any]) -> bytes:
    """Return the signature of a message: its frames are bytes, memoryviews or zmq.Frames."""
    made = hashlib.blake2b(key=key, digest_size=32)
    made.update(str([frame.nbytes if type(frame) is memoryview else len(frame) for frame in frames]).encode())
    for frame in frames if _pickled(frames) else frames[:1]:
        made.update(frame)
    return made.digest()


def _pickled(frames: list[Any]) -> bool:
    from transfer_queue.utils.serial_utils import _PICKLE_FALLBACK_SENTINEL as MARK

    return bool(frames) and bytes(memoryview(frames[0])[: len(MARK)]) == MARK


def sign_messages(key: bytes) -> None:
    """From now on, let this process sign each message that it sends, and refuse each that lacks the signature."""
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQMessageDecodeError

    message: Any = ZMQMessage
    if message not in _UNSIGNED:
        _UNSIGNED[message] = message.serialize, message.deserialize.__func__
    serialize, deserialize = _UNSIGNED[message]

    def signed(self: Any) -> list[Any]:
        frames = [*serialize(self)]
        return [*frames, signature(key, frames)]

    def checked(cls: Any, frames: list[Any]) -> Any:
        *rest, given = frames or [b""]
        if not hmac.compare_digest(bytes(memoryview(given)), signature(key, rest)):
            raise ZMQMessageDecodeError("it is not signed with the key of the run")
        return deserialize(cls, rest)

    message.serialize, message.deserialize = signed, classmethod(checked)
