"""Backends, which compute for the stages of a worker group. Describes each by name; loads none of them.

    WorkerGroup("sampler", backend="vllm")                                     # a registered one
    WorkerGroup("sampler", backend=Backend(name="mine", opener=open_mine, can=("sample",)))    # your own

`stages.backends` registers the ones that come with Sluice. Your own needs no registration: it travels with its group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.declare.calls import fault, takes
from pipeline.declare.parameters import Rule, broken
from pipeline.errors import Problem

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
    fits      `fits(group, config, where)` yields problems of a worker group with a model; `config` is the model's
              Hugging Face config as a dict, as far as it is known before the model is loaded
    leads     whether one process starts all ranks of a replica itself and allocates its share of GPU memory at once
    separates whether attention in a packed row computes each sample alone, so that its cost grows with the square of
              the sample; otherwise it computes the whole row and masks, and a row costs what its tokens cost
    shares    whether it computes the prompt of samples once in a packed row that says so (`Microbatch.shared`)
    slices    whether context-parallel workers divide packed rows and nothing else, so that stages need Packed
    own_classes  whether it builds models from its own classes and safetensors only, so that it cannot run code that
              comes with a model; Model(trust_remote_code=True) is then refused
    adapts    whether it trains or serves adapters; Model(lora=...) is refused otherwise
    replays   the devices on which it returns the experts that it chose, or computes with given ones: "cpu", "cuda";
              Model(router_replay=True) is refused on others
    joins     whether samples join those that are decoded already; otherwise a stream is decoded from its first to its
              last token, and the turns of episodes wait for each other
    sees      whether its methods take the images of prompts; Model(images=True) is refused otherwise
    """

    name: str
    packages: tuple[str, ...] = ()
    install: str = ""
    can: tuple[Work, ...] = ()
    opener: str | Callable[[Any], Any] | None = None
    checks: str | Callable[[Any, str], Any] | None = None
    fits: str | Callable[[Any, Any, str], Any] | None = None
    leads: bool = False
    separates: bool = True
    shares: bool = False
    slices: bool = False
    own_classes: bool = False
    adapts: bool = False
    replays: tuple[str, ...] = ()
    joins: bool = False
    sees: bool = False


PLAIN = Backend(name="python")  # plain functions
BACKENDS: dict[str, Backend] = {PLAIN.name: PLAIN}


def register(backend: Backend) -> None:
    """Register a backend, so that worker groups can name it. Raises ValueError if another one has that name."""
    if BACKENDS.setdefault(backend.name, backend) != backend:
        raise ValueError(f"another backend is named {backend.name!r}")


def description_problems(backend: Backend, where: str) -> Iterator[Problem]:
    """What is wrong with the description of a backend that computes with a model."""
    return broken(_RULES, backend, where=where, says=f"backend {backend.name!r} has {{}}")


def _is_named(function: object) -> bool:
    """Whether it is "module:function"."""
    parts = function.split(":") if isinstance(function, str) else []
    return len(parts) == 2 and all(part.replace(".", "_").isidentifier() for part in parts)


def _yields(function: object, parameters: str) -> bool:
    """Whether problems can be asked of it: it may be a generator."""
    return fault(function, parameters) in ("", "is a generator") and takes(function, parameters)


_RULES = (
    Rule(
        "name", lambda name: isinstance(name, str) and bool(name), "records and messages show the name", "name='mine'"
    ),
    Rule(
        "can",
        lambda can: isinstance(can, tuple | list) and bool(can) and set(can) <= set(WORK),
        f"can must be a tuple of {', '.join(map(repr, WORK))}",
        "can=('sample',)",
    ),
    Rule(
        "packages",
        lambda names: isinstance(names, tuple | list) and all(isinstance(name, str) for name in names),
        "packages are those that its workers import, a tuple of strings",
        "packages=('torch',)",
    ),
    Rule(
        "replays",
        lambda devices: isinstance(devices, tuple | list) and set(devices) <= {"cpu", "cuda"},
        "replays names the devices on which experts can be returned or given",
        "replays=('cpu', 'cuda')",
    ),
    Rule(
        "opener",
        lambda opener: _is_named(opener) or not fault(opener, "context"),
        "opener(context) returns the engine; it is a plain function, not async, or 'module:function'",
        "opener=open_mine, with def open_mine(context)",
    ),
    Rule(
        "checks",
        lambda checks: checks is None or _is_named(checks) or _yields(checks, "group, where"),
        "checks(group, where) yields problems; it is a function or 'module:function'",
        "checks=check_mine, with def check_mine(group, where), or leave it out",
    ),
    Rule(
        "fits",
        lambda fits: fits is None or _is_named(fits) or _yields(fits, "group, config, where"),
        "fits(group, config, where) yields problems; it is a function or 'module:function'",
        "fits=fits_mine, with def fits_mine(group, config, where), or leave it out",
    ),
)
