"""Messages of the data plane without the run's signature are refused before anything in them is unpickled."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue.utils.serial_utils import _PICKLE_FALLBACK_SENTINEL
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQMessageDecodeError, ZMQRequestType

from pipeline.data_plane import signed
from pipeline.data_plane.signed import KEY_BYTES, sign_messages, signature
from pipeline.data_plane.transfer_queue import TransferQueuePlane

KEY = b"k" * KEY_BYTES


class Opens:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


@pytest.fixture
def signing() -> Iterator[None]:
    """This process signs with a key of the test, and afterwards as before."""
    before = ZMQMessage.serialize, ZMQMessage.__dict__["deserialize"]
    sign_messages(KEY)
    yield
    ZMQMessage.serialize, ZMQMessage.deserialize = before


def forged(file: Path, *, whole: bool) -> list[bytes]:
    """The frames of a message that creates the file, unsigned; with `whole` TransferQueue has pickled all of it."""
    body = {"partition_id": Opens(file)} | ({"large": 2**70} if whole else {})
    made = ZMQMessage.create(ZMQRequestType.KV_LIST, "stranger", body)
    frames = [bytes(frame) for frame in signed._UNSIGNED[ZMQMessage][0](made)]
    assert frames[0].startswith(_PICKLE_FALLBACK_SENTINEL) == whole
    return frames


@pytest.mark.usefixtures("signing")
@pytest.mark.parametrize("whole", [False, True])
def test_a_message_is_read_with_the_runs_signature_only(whole: bool, tmp_path: Path) -> None:
    file = tmp_path / "made"
    frames = forged(file, whole=whole)
    other = signature(b"o" * KEY_BYTES, frames)
    right = signature(KEY, frames)
    empty: list[list[bytes]] = [[], [b""], [right]]
    for wrong in [*empty, frames, [*frames, b""], [*frames, other], [*frames, b"", right], [b"", *frames, right]]:
        with pytest.raises(ZMQMessageDecodeError, match="not signed"):
            ZMQMessage.deserialize(wrong)
        assert not file.exists()
    ZMQMessage.deserialize([*frames, right])
    assert file.exists()


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.data())
def test_no_frame_can_be_exchanged_for_one_of_another_size_and_nothing_that_is_unpickled_for_any(
    frames: list[bytes], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(frames) - 1))
    new = data.draw(st.binary(max_size=40).filter(lambda made: made != frames[at]))
    changed = [*frames[:at], new, *frames[at + 1 :]]
    if at == 0 or len(new) != len(frames[at]):
        assert signature(KEY, changed) != signature(KEY, frames)
    marked = [_PICKLE_FALLBACK_SENTINEL, *frames], [_PICKLE_FALLBACK_SENTINEL, *changed]
    assert signature(KEY, marked[0]) != signature(KEY, marked[1])


def test_every_socket_of_transfer_queue_is_closed_to_a_stranger(ray_session: Any, session_store: Any, tmp_path: Path):
    """A stranger connects to each port, as a peer that the storage units let in, and sends what would run its code."""
    settings = session_store.plane.settings
    ports = [(ip, port) for _, ip, own in (settings.controller, *settings.storage) for port in own.values()]
    assert len(ports) >= 3
    context = zmq.Context()
    try:
        for number, (ip, port) in enumerate(ports):
            for whole in (False, True):
                file = tmp_path / f"{number} {whole}"
                frames = forged(file, whole=whole)
                strangers = [frames, [*frames, signature(secrets.token_bytes(KEY_BYTES), frames)]]
                answers = [asked(context, ip, port, each) for each in strangers]
                assert not file.exists(), (ip, port)
                if (ip, port) == (settings.controller[1], settings.controller[2]["request_handle_socket"]):
                    assert all(b"not signed" in b"".join(answer) for answer in answers)
                    assert asked(context, ip, port, [*frames, signature(settings.key, frames)])
                    assert file.exists(), "with the key it would be read"
    finally:
        context.destroy(linger=0)
    assert isinstance(session_store.plane, TransferQueuePlane) and session_store.plane.row_count("none") == 0


def asked(context: zmq.Context[Any], ip: str, port: int, frames: list[bytes], wait_ms: int = 300) -> list[bytes]:
    """Send a message and return the answer; empty if none comes."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"TQ_STORAGE_" + secrets.token_hex(4).encode())
    socket.connect(f"tcp://{ip}:{port}")
    try:
        socket.send_multipart(frames)
        return socket.recv_multipart() if socket.poll(wait_ms) else []
    finally:
        socket.close(linger=0)
