"""Processes of vLLM engines that have imported vLLM before they start: six of the seven seconds of a start are imports.

    with imported_once():
        ...                 # engines that start in here are forked from one process, which imports vLLM for all of them

The product spawns them; `test_vllm_faults.test_an_engine_ends_with_its_worker` and the runs on Ray do that too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver
from typing import Any
from unittest.mock import patch

from stages.backends.vllm import environment

PRELOADED = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.model_loader.default_loader",
    "stages.backends.vllm.choice",
    "stages.backends.vllm.loader",
    "stages.backends.vllm.transfer",
    "tests.engines.prepared",
)


class Process(context.ForkServerProcess):
    """It has the environment of its parent, as one that is spawned has."""

    def __init__(self, *, target: Callable[..., None], **named: Any) -> None:
        super().__init__(target=target, **named)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # of ranks, out of the engine: vLLM's own default
        super().run()


class Context(context.ForkServerContext):
    """What vLLM asks for processes, queues and pipes."""

    Process = Process


@contextmanager
def imported_once() -> Iterator[None]:
    """Engines that start meanwhile are forked."""
    environment.prepare(gpus=False, threads=1, tensor_parallel=1)
    forkserver.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()
    try:
        with patch("vllm.v1.engine.utils.get_mp_context", Context):
            yield
    finally:
        for process in [*engines(), server()]:  # a test that failed may have left an engine
            os.kill(process, signal.SIGKILL)
        forkserver._forkserver._stop()


def server() -> int:
    """The process that forks."""
    found = forkserver._forkserver._forkserver_pid
    assert found is not None
    return found


def engines() -> list[int]:
    """The processes of vLLM that this one has, and that run."""
    import psutil

    return [child.pid for child in psutil.Process(server()).children() if runs(child.pid)]


def runs(process: int) -> bool:
    """Whether it exists and is more than an exit code that nobody has asked for."""
    import psutil

    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
