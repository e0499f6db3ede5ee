"""Signs TransferQueue's messages with a key of the run: its sockets unpickle what they receive, and any local user, or
with `--trusted-network` any machine, can connect to them. A message without the signature is refused unread.

The signature covers what is unpickled (the header; without a header, everything) and the size of every frame, not the
bytes of tensors: to exchange those takes someone who can change packets in transit. The key travels through Ray, which
asks for the token of the run.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

A_BIT = 0.001  # of a node's own resource, of which each node has 1
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


@contextmanager
def signing_actors(key: bytes, controller_resource: str | None = None) -> Iterator[None]:
    """Inside this context, TransferQueue starts actors that sign and check from before they open a socket; its
    controller on a node with this Ray resource, if it is given."""
    from transfer_queue import interface
    from transfer_queue.storage.bootstrap import simple_storage_bootstrap as storage

    places: tuple[tuple[Any, str], ...] = (interface, "TransferQueueController"), (storage, "SimpleStorageUnit")
    before = [getattr(module, name) for module, name in places]
    resources = {controller_resource: A_BIT} if controller_resource else {}
    for (module, name), actor, wanted in zip(places, before, (resources, {})):
        remote = interface.ray.remote(num_cpus=1, resources=wanted)
        setattr(module, name, remote(_signing(actor.__ray_metadata__.modified_class, key)))
    try:
        yield
    finally:
        for (module, name), actor in zip(places, before):
            setattr(module, name, actor)


def _signing(actor: Any, key: bytes) -> type:
    """Return the actor's class with signed messages. Ray sends it by value, with the key."""
    sign: Callable[[bytes], None] = sign_messages

    class Signing(actor):
        def __init__(self, *given: Any, **named: Any) -> None:
            sign(key)
            super().__init__(*given, **named)

    Signing.__name__ = Signing.__qualname__ = actor.__name__
    return Signing
