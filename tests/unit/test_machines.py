"""Machines that stop answering: said once and soon, and lost after a while; connections are replaced by a table."""

import socket
import threading

import pytest

from pipeline.errors import WorkerLost
from pipeline.executors import machines
from pipeline.executors.machines import LOST, POLL_S, SAID, Machines, reached
from tests.waiting import until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "POLL_S", 0.01)


def test_the_warning_comes_within_10_s() -> None:
    assert POLL_S + SAID * POLL_S < 10 < LOST * POLL_S < 60


def test_a_silent_machine_is_said_and_then_lost(capsys: pytest.CaptureFixture[str]) -> None:
    silent, held = threading.Event(), threading.Event()
    polls: list[str] = []

    def reaches(address: str, port: int) -> bool:
        if not silent.is_set() or address == "b":
            return True
        polls.append(f"{address}:{port}")
        if len(polls) > SAID:
            assert held.wait(20)
        return False

    watched = Machines(reaches)
    watched.watch({"a": 1, "b": 2}, {"a": ["learner.0", "learner.1"], "b": ["sampler.0"]})
    watched.watch({"a": 1}, {"a": ["learner.0", "learner.1"]})
    watched.look()
    silent.set()
    until(lambda: len(polls) > SAID)
    watched.look()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("machine a: warning: it has not answered for 0.03 s; there: learner.0, learner.1; it lost")
    held.set()
    until(lambda: len(polls) > LOST)
    with pytest.raises(WorkerLost, match=r"machine a: it has not answered .*; there: learner.0, learner.1;"):
        watched.look()
    assert set(polls) == {"a:1"} and not capsys.readouterr().err
    watched.close()


def test_a_machine_that_answers_again_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [False] * (LOST - 1)
    watched = Machines(lambda address, port: answers.pop() if answers else True)
    watched.watch({"a": 1}, {})
    until(lambda: not answers and not watched._missed["a"])
    watched.look()
    watched.close()
    assert [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()][1:] == ["machine a answers again"]


def test_a_port_that_listens_is_reached_and_a_closed_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reached("127.0.0.1", port)
    assert not reached("127.0.0.1", port)
