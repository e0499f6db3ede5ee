"""Backends, which compute for the stages of a worker group. Describes each by name; loads none of them.

    WorkerGroup("sampler", backend="vllm")                                     # a registered one
    WorkerGroup("sampler", backend=Backend(name="mine", opener=open_mine, can=("sample",)))    # your own

`stages.backends` registers the ones that come with Sluice. Your own needs no registration: it travels with its group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Work = Literal["sample", "score", "train", "reward"]
WORK: tuple[Work, ...] = ("sample", "score", "train", "reward")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend. A function is passed as such, or as "module:function" to be imported when needed.

    name      in records and messages
    packages  that it needs; checked without importing them
    install   the command that installs them
    can       what it does: "sample", "score", "train", "reward"; empty means plain functions only
    opener    `opener(context: StageContext)` returns the engine of a worker. It runs once per worker, and the engine
              has the methods of `stages.backends.interface` for what the backend `can` do
    checks    `checks(group, where)` yields problems of a worker group; it loads nothing heavy
    leads     whether one process starts all ranks of a replica itself and allocates its share of GPU memory at once
    """

    name: str
    packages: tuple[str, ...] = ()
    install: str = ""
    can: tuple[Work, ...] = ()
    opener: str | Callable[[Any], Any] | None = None
    checks: str | Callable[[Any, str], Any] | None = None
    leads: bool = False


PLAIN = Backend(name="python")  # plain functions
BACKENDS: dict[str, Backend] = {PLAIN.name: PLAIN}


def register(backend: Backend) -> None:
    """Register a backend, so that worker groups can name it. Raises ValueError if another one has that name."""
    if BACKENDS.setdefault(backend.name, backend) != backend:
        raise ValueError(f"another backend is named {backend.name!r}")
