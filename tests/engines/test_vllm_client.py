"""The end of a vLLM client whose work does not end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.optional import need

need("vllm", "vllm")


def test_what_does_not_end_in_time_keeps_neither_the_loop_nor_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM would leave its sockets open for a loop that only stands still, and the garbage collector wait for them."""
    from stages.backends.vllm import client

    closed: list[tuple[float, bool]] = []
    setup = client.Setup(folder=tmp_path, gpus=False, tensor_parallel=1, memory=0.5, where="graph.py:7")
    made = client.Client(setup)

    class Engine:
        def shutdown(self, timeout_s: float) -> None:
            closed.append((timeout_s, made._loop.is_closed()))

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
    engine: Any = Engine()
    made._llm = engine
    monkeypatch.setattr(client, "CLOSE_S", 0.2)
    made.close()
    assert closed == [(client.SHUTDOWN_S, True)] and not kept.done()
    made.close()
    assert len(closed) == 1
