"""Starts vLLM's engine as a fork of a process that imports vLLM while its owner does. Does not import vLLM itself.

    import_ahead(gpus=True)              # before the owner imports vLLM
    engine.utils.get_mp_context = forks  # vLLM's own way to start an engine

Otherwise an owner, its engine and the engine's workers would import the same modules one after the other. The owner
itself cannot be forked, since it has threads.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

from stages.backends.vllm.environment import METHOD, end_with_owner

IMPORTED = ("stages.backends.vllm.loader", "stages.backends.vllm.choice", "vllm.v1.engine.core")
ON_GPU = ("vllm.v1.worker.gpu_worker", "vllm.v1.executor.multiproc_executor")
ON_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.executor.multiproc_executor")


class EngineProcess(ForkServerProcess):
    """A process with the environment that its creator has when it starts it, which ends with its owner. It may fork: it
    is forked itself, before any thread and before CUDA."""

    def start(self) -> None:
        """Like the base class."""
        self._environment = dict(os.environ) | {METHOD: "fork"}
        super().start()

    def run(self) -> None:
        """Like the base class."""
        os.environ.clear()
        os.environ.update(self._environment)
        end_with_owner()
        super().run()


class Forks(ForkServerContext):
    """The start method of `EngineProcess`."""

    Process = EngineProcess


def forks() -> Forks:
    """Return the context in which vLLM starts its engine."""
    return Forks()


def import_ahead(gpus: bool) -> None:
    """Start the process that is forked, with vLLM's modules for this device. Returns at once."""
    multiprocessing.set_forkserver_preload([*IMPORTED, *(ON_GPU if gpus else ON_CPU)])
    forkserver.ensure_running()
