"""A dead control store of Ray's is noticed, and ends the process even if that is in a call that does not return."""

from __future__ import annotations

import socket
import threading

import pytest

from pipeline.errors import StageError
from pipeline.executors import control_store
from pipeline.executors.control_store import ControlStore, Lifeline, refused


def test_a_control_store_has_died_once_its_port_refuses_three_times_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, answers = [0.0], iter([True, True, False, True, True, True])
    monkeypatch.setattr(control_store.time, "monotonic", lambda: now_s[0])
    store = ControlStore("127.0.0.1:6379", lambda address, port: next(answers))
    for _ in range(5):
        store.look()
        store.look()  # too early to ask again
        now_s[0] += control_store.POLL_S
    assert not store.is_dead
    with pytest.raises(StageError, match="its process has died"):
        store.look()
    assert store.is_dead


def test_a_port_is_refused_only_where_no_process_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not refused("127.0.0.1", port)
    assert refused("127.0.0.1", port)


@pytest.mark.parametrize("ends_in_order", [False, True])
def test_a_process_that_nothing_else_ends_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ends_in_order: bool
) -> None:
    monkeypatch.setattr(control_store, "POLL_S", 0.01)
    monkeypatch.setattr(control_store, "GRACE_S", 60.0 if ends_in_order else 0.05)
    asked, left, codes = threading.Event(), threading.Event(), []

    def refuses(address: str, port: int) -> bool:
        asked.set()
        return True

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    lifeline = Lifeline(ControlStore("127.0.0.1:6379", refuses), lambda: print("resume: again"), leave)
    assert asked.wait(10)
    if ends_in_order:
        lifeline.close()
    assert left.wait(0.2 if ends_in_order else 10) is not ends_in_order
    said = capsys.readouterr()
    assert codes == ([] if ends_in_order else [3])
    assert ("its process has died" in said.err, said.out) == (
        not ends_in_order,
        "" if ends_in_order else "resume: again\n",
    )
