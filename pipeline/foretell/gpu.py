"""GPUs that were measured: memory, and what they do per second with this project's kernels. Data, with its sources.

    found = asked("h200:2")
    found.count, found.gpu.memory_bytes, found.gpu.rates["megatron.training"]["products"]

The files in `gpus/` are written by `python -m benchmarks.gpu.tables` from kept results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from pipeline.errors import GraphError, Problem
from pipeline.reading import decode

FOLDER = Path(__file__).with_name("gpus")
MOST = 100_000  # GPUs


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of GPU.

    gpu           its name, as torch has it
    memory_bytes  that CUDA reports
    rates         by kind of work, such as "megatron.training": amounts per second, by the names of
                  `pipeline.declare.work.GpuWork`; of "vllm.sampling" by those of `Decoding`, and `tokens` that the host
                  handles
    sources       by kind of work: the results from which its rates were computed
    """

    gpu: str
    memory_bytes: int
    rates: Mapping[str, Mapping[str, float]]
    sources: Mapping[str, str]


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """A number of GPUs of one kind; `name` is that of the kind."""

    name: str
    count: int
    gpu: Gpu


def known() -> list[str]:
    """Return the names of the GPUs that were measured."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def table(name: str) -> Gpu:
    """Return a GPU by its name in `known`."""
    return decode((FOLDER / f"{name}.json").read_bytes(), Gpu)


def asked(text: str) -> Gpus:
    """Return the GPUs of a text such as "h200:2", or "h200" for one. Raises GraphError if it names no known kind, or
    no number of GPUs."""
    name, colon, count = text.lower().partition(":")
    if name in known() and colon and (not re.fullmatch(r"[1-9]\d{0,8}", count) or int(count) > MOST):
        raise GraphError(
            Problem(
                where=f"--on {text}",
                what=f"{count!r} is no number of GPUs" if count else "the number of GPUs is missing",
                why=f"it is a whole number, 1 to {MOST:,}",
                fix=f"--on {name}:{MOST if re.fullmatch(r'[1-9][0-9]*', count) else 1}",
            )
        )
    if name not in known():
        raise GraphError(
            Problem(
                where=f"--on {text}",
                what="it names no GPUs that were measured",
                why=f"time and memory are foretold from measurements, of {' and '.join(known())}",
                fix=f"--on {known()[-1]}:1",
            )
        )
    return Gpus(name=name, count=int(count or 1), gpu=table(name))
