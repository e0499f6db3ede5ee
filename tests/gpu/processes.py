"""Processes that see one GPU each, as workers do."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

DEADLINE_S = 180.0


def each(
    function: Callable[..., Any], gpus: Sequence[str], *given: Any, environment: Mapping[str, str] | None = None
) -> list[Any]:
    """What `function(rank, *given)` returns, or raises, in a process for each of the GPUs. They are killed then, also
    where something in them waits without an end."""
    with ExitStack() as ended:
        answers = []
        for rank, gpu in enumerate(gpus):
            seen = {"CUDA_VISIBLE_DEVICES": gpu, **(environment or {})}
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (seen,))
            ended.callback(_kill, pool)
            answers.append(pool.submit(function, rank, *given))
        return [answer.exception(DEADLINE_S) or answer.result() for answer in answers]


def _begin(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


def _kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
