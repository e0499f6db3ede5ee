"""Waiting for a store: a slow one is waited for, a lost reply is requested again, a dead one is detected at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from pipeline.data_plane.patience import ASKED, Patience, StoreGoneError

REPOSITORY = Path(__file__).parents[2]


def test_a_process_that_is_gone_ends_the_wait():
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        addresses = {"there": there.getsockname(), "gone": gone.getsockname()}
        with pytest.raises(TimeoutError):
            Patience(addresses, 0.3).wait(Future())
        gone.close()
        with pytest.raises(StoreGoneError, match=r"^gone$"):
            Patience(addresses, 30).wait(Future())


def test_an_answer_is_taken_even_where_it_is_a_timeout():
    answered: Future[int] = Future()
    answered.set_result(7)
    assert Patience({}, 10).wait(answered) == 7
    failed: Future[int] = Future()
    failed.set_exception(TimeoutError("of its own"))
    with pytest.raises(TimeoutError, match="of its own"):
        Patience({}, 10).wait(failed)


@pytest.mark.parametrize("lost", range(ASKED + 1))
def test_a_request_without_an_answer_is_made_again(lost):
    made = []

    async def request() -> str:
        made.append(None)
        if len(made) <= lost:
            await asyncio.Event().wait()
        return "answer"

    async def ask() -> str:
        async with asyncio.timeout(1.0):
            return await Patience({}, 0.3).ask(request)

    if lost == ASKED:
        with pytest.raises(TimeoutError):
            asyncio.run(ask())
    else:
        assert asyncio.run(ask()) == "answer"
    assert len(made) == min(lost + 1, ASKED)


def test_a_request_that_fails_is_not_made_again():
    made = []

    async def request() -> None:
        made.append(None)
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        asyncio.run(Patience({}, 1).ask(request))
    assert len(made) == 1


STOPPED = """
from concurrent.futures import Future
from threading import Event, Thread
from pipeline.data_plane.patience import Patience

answer = Future()
def soon():
    for _ in range(10):
        Event().wait(0.05)
    answer.set_result("answered")
Thread(target=soon, daemon=True).start()
print("waits", flush=True)
print(Patience({}, 2.0).wait(answer), flush=True)
"""


def test_a_caller_that_was_stopped_itself_finds_nobody_late():
    with subprocess.Popen([sys.executable, "-c", STOPPED], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "waits\n"
        os.kill(caller.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(caller.pid, signal.SIGCONT)
        assert caller.stdout.readline() == "answered\n"
