"""Start vLLM engine processes with vLLM already imported: six of the seven seconds of a start are imports.

    with imported_once():
        ...                 # engines that start in here are forked from one process, which imports vLLM for all of them

In production engines are spawned; `test_vllm_faults.test_an_engine_ends_with_its_worker` and the runs on Ray do that
too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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
    "stages.backends.vllm.speculation",
    "stages.backends.vllm.transfer",
    "tests.engines.prepared",
)


class Process(context.ForkServerProcess):
    """A forked process with the environment of its parent, as a spawned process would have."""

    def __init__(self, *, target: Callable[..., None], **named: Any) -> None:
        super().__init__(target=target, **named)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # for ranks started by the engine: vLLM's own default
        super().run()


class Context(context.ForkServerContext):
    """The multiprocessing context that vLLM uses for processes, queues and pipes."""

    Process = Process


@contextmanager
def imported_once() -> Iterator[None]:
    """Fork all engines that start within the context."""
    environment.prepare(gpus=False, threads=1, tensor_parallel=1)
    forkserver.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()
    try:
        with patch("vllm.v1.engine.utils.get_mp_context", Context):
            yield
    finally:
        kill([*engines(), server()])  # a failed test may have left an engine
        forkserver._forkserver._stop()


def server() -> int:
    """Return the id of the fork server process."""
    found = forkserver._forkserver._forkserver_pid
    assert found is not None
    return found


def engines() -> list[int]:
    """Return the ids of the running vLLM processes that the fork server started."""
    import psutil

    return [child.pid for child in psutil.Process(server()).children() if runs(child.pid)]


def kill(processes: Iterable[int]) -> None:
    """Kill processes; those that have just ended are left out."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def runs(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    import psutil

    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
