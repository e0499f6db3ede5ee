"""Run functions in processes that each see one GPU, like workers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

DEADLINE_S = 300.0  # with the start of an engine that compiles


def each(
    function: Callable[..., Any], gpus: Sequence[str], *given: Any, environment: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> list[Any]:  # fmt: skip
    """Return the results or exceptions of `function(rank, *given)`, run in one process per GPU of those that this
    process may use.

    The processes are killed afterwards, even if something in them hangs."""
    with ExitStack() as ended:
        answers = []
        usable = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        for rank, gpu in enumerate(gpus):
            seen = {"CUDA_VISIBLE_DEVICES": usable[int(gpu)] if usable[0] else gpu, **(environment or {})}
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (seen,))
            ended.callback(_kill, pool)
            answers.append(pool.submit(function, rank, *given))
        return [answer.exception(deadline_s) or answer.result() for answer in answers]


def _begin(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


def _kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
