"""The end of a vLLM client whose work does not end."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from pipeline import Model
from tests.engines import vllm_models as tiny
from tests.optional import need

need("vllm", "vllm")


def open_sockets() -> set[int]:
    """The ZeroMQ sockets of this process that are open."""
    made = [each for each in gc.get_objects() if issubclass(type(each), zmq.Socket)]
    return {id(each) for each in made if not each.closed}


def test_what_does_not_end_in_time_keeps_neither_the_loop_nor_the_engine(
    prepared: None, model: Model, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would leave its sockets open for a loop that only stands still, and the garbage collector wait for them."""
    from stages.backends.vllm import client
    from stages.backends.vllm.engine import open_engine

    before = open_sockets()
    made = open_engine(tiny.context(root)).client(model)
    assert made._llm is not None and open_sockets() - before
    closed: list[tuple[float, bool]] = []
    shutdown = made._llm.shutdown

    def watched(timeout_s: float) -> None:
        closed.append((timeout_s, made._loop.is_closed()))
        shutdown(timeout_s)

    async def stubborn(begun: asyncio.Event) -> None:
        begun.set()
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def begin() -> Any:
        begun = asyncio.Event()
        kept = asyncio.ensure_future(stubborn(begun))
        await begun.wait()
        return kept

    kept = made.call(begin())
    monkeypatch.setattr(made._llm, "shutdown", watched)
    monkeypatch.setattr(client, "CLOSE_S", 0.2)
    made.close()
    assert closed == [(client.SHUTDOWN_S, True)] and not kept.done()
    assert open_sockets() <= before
    made.close()
    assert len(closed) == 1
