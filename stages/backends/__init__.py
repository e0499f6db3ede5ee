"""Backends compute for stages that need a model. Holds the registry of names, and the checks that need no backend.

A worker opens its engine once, and all its stages share it:

    engine(context).score(model, prompt_ids, response_ids, one_shard(prompt_ids, response_ids), temperature=1.0)

This module knows names only; a backend loads when a worker calls `engine`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import Backend, Model, Stage, StageContext, StageError, WorkerGroup
from pipeline.declare.backend import BACKENDS, Work, description_problems, register
from pipeline.declare.calls import import_fault, is_async, is_generator
from pipeline.declare.interpreter import Answer, ask, is_elsewhere
from pipeline.declare.parameters import is_whole
from pipeline.errors import Problem, line_of_code, problems_of, shown
from pipeline.reading import refused
from stages.backends.interface import (
    PULL,
    STREAM_ROLLOUT,
    Batch,
    Cancelled,
    Decoded,
    Draws,
    Engine,
    Generation,
    Judge,
    Learner,
    Optimization,
    Route,
    Sampler,
    Sampling,
    ServedWeights,
    Trainer,
    cut,
    one_shard,
    part,
    samples_of,
)
from stages.images import blind_problems, image_problems
from stages.lora import LoRA, group_problems, lora_problems
from stages.model_files import code_problems, in_hub_cache, lacking_problems, tokenizer_faults, unknown_name
from stages.model_shape import known_config, read_config, shape_faults
from stages.model_weights import weight_faults
from stages.routes import mixture_problems, replay_problems
from stages.vocabulary import IMAGES

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
    "ServedWeights",
    "Work",
    "asked",
    "backend_problems",
    "cut",
    "engine",
    "is_installed",
    "model_problems",
    "one_shard",
    "part",
    "samples_of",
]


DOES = {"sample": "samples", "score": "computes logprobs", "train": "trains", "reward": "runs reward models"}
CONTRACT = {"sample": Sampler, "score": Trainer, "train": Trainer, "reward": Judge}  # the methods that an engine needs

for _backend in (
    Backend(
        name="torch",
        packages=("torch", "transformers"),
        install="pip install torch transformers",
        can=("sample", "score", "train", "reward"),
        opener="stages.backends.torch.engine:open_engine",
        checks="stages.backends.torch.limits:problems",
        separates=False,
        adapts=True,
        replays=("cpu", "cuda"),
        sees=True,
    ),
    Backend(
        name="vllm",
        packages=("vllm",),
        install="pip install 'sluice-rl[vllm]', or on a CPU python -m stages.backends.vllm.install_cpu",
        can=("sample",),
        opener="stages.backends.vllm.engine:open_engine",
        checks="stages.backends.vllm.limits:problems",
        fits="stages.backends.vllm.limits:fits",
        leads=True,
        joins=True,
        own_classes=True,
        adapts=True,
        replays=("cuda",),
        sees=True,
    ),
    Backend(
        name="megatron",
        packages=("megatron.core",),
        install="pip install 'sluice-rl[megatron]'",
        can=("score", "train"),
        opener="stages.backends.megatron.engine:open_engine",
        checks="stages.backends.megatron.limits:problems",
        fits="stages.backends.megatron.limits:fits",
        shares=True,
        slices=True,
        own_classes=True,
        adapts=True,
        replays=("cpu", "cuda"),
    ),
):
    register(_backend)


def engine(context: StageContext) -> Engine:
    """The worker's engine, opened by the first call. Raises StageError if the group's backend has none."""
    if "engine" not in context.shared:
        backend = context.group.description
        if backend is None or backend.opener is None:
            raise StageError(*backend_problems(context.group))
        opened = _call(backend.opener, context)
        if problems := list(_engine_problems(opened, backend, str(context.group.location))):
            raise StageError(*problems)
        context.shared["engine"] = opened
    return context.shared["engine"]


def _call(function: str | Callable[..., Any], *given: Any) -> Any:
    """Call a function, which is imported if it is given as "module:function"."""
    if not isinstance(function, str):
        return function(*given)
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*given)


def _engine_problems(opened: object, backend: Backend, where: str) -> Iterator[Problem]:
    """The methods that an engine lacks for its backend's `can`, and those that it defines in another form."""
    wanted = {name: CONTRACT[work] for work in backend.can for name in dir(CONTRACT[work]) if not name.startswith("_")}
    methods = {name: getattr(opened, name, None) for name in wanted}
    if missing := [f"{name}()" for name, method in methods.items() if not callable(method)]:
        yield Problem(
            where=where,
            what=f"the opener of backend {backend.name!r} returned None"
            if opened is None
            else f"the engine of backend {backend.name!r} has no {', '.join(missing)}",
            why=f"the backend has can={backend.can!r}, so stages call these methods",
            fix="define them, see docs/your-own-backend.md and stages/backends/interface.py, or change can=",
        )
    for name, method in methods.items():
        listed = inspect.signature(getattr(wanted[name], name)).parameters.values()
        expected = [each for each in listed if each.name != IMAGES.name or backend.sees]
        if callable(method) and (wrong := _method_fault(method, expected[1:], may_yield=name == "stream")):
            yield Problem(
                where=line_of_code(method) or where,
                what=f"{name}() of the engine of backend {backend.name!r} {wrong}",
                why="stages call it as stages/backends/interface.py describes it",
                fix=f"write def {name}({_listed(expected)})",
            )


def _method_fault(method: Callable[..., Any], expected: Sequence[inspect.Parameter], *, may_yield: bool) -> str:
    """Why a method cannot be called with these parameters; "" if it can."""
    if is_async(method) or (is_generator(method) and not may_yield):
        return "is async" if is_async(method) else "is a generator"
    named = {each.name: None for each in expected if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(method).bind(*expected[: len(expected) - len(named)], **named)
    except TypeError as error:
        return f"does not take ({_listed(expected)}): {error}"
    except ValueError:  # written in C
        pass
    return ""


def _listed(parameters: Sequence[inspect.Parameter]) -> str:
    """The names of parameters as in a signature."""
    by_place = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    return ", ".join([*by_place, *(["*", *by_name] if by_name else [])])


def backend_problems(
    group: WorkerGroup | None, stage: Stage | None = None, work: Work | None = None
) -> Iterator[Problem]:
    """Reasons why a worker group cannot run a model. Finds packages without importing them.

    `stage` does `work` on the group; if it names no group, the problem is reported for the stage.
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
    where, has = str(group.location), f"worker group {group.name!r} has the backend {shown(group.backend)}"
    backend = group.description
    if backend is None:
        near = difflib.get_close_matches(str(group.backend), BACKENDS, n=1)
        known = ", ".join(repr(name) for name in BACKENDS)
        fix = f"did you mean {near[0]!r}?" if near else f"one of {known}, or a Backend of your own"
        yield Problem(
            where=where,
            what=has,
            why="no backend has that name" if isinstance(group.backend, str) else "a backend is a name or a Backend",
            fix=fix,
        )
        return
    if BACKENDS.get(backend.name, backend) != backend:
        why = "messages and records could not tell the two apart"
        fix = "use Backend(name=...) with another name"
        yield Problem(where=where, what=f"{has}, a name that is taken", why=why, fix=fix)
        return
    if (backend.can or backend.opener) and (wrong := list(description_problems(backend, where))):
        yield from wrong
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
            why=f"{backend.name!r} can only {' and '.join(backend.can)}",
            fix="another worker group, with backend=" + " or ".join(repr(name) for name in models),
        )
    if backend.own_classes and stage:
        yield from (_trusts(model, backend) for model in stage.uses if model.trust_remote_code is True)
    for model in stage.uses if stage else ():
        yield from group_problems(model, group)
        yield from replay_problems(model, group)
    not_found = list(_import_problems(backend, group))
    unfit = [] if not_found else list(_own_checks(backend, group, stage, where))
    blind = [problem for model in (stage.uses if stage else ()) for problem in blind_problems(model, group)]
    yield from unfit or blind  # a model that it cannot compute at all may explain the rest
    sees = any(model.images is True for model in (stage.uses if stage else ()))
    lacks = [*_package_problems(backend, group, has), *(_pillow_problems(group) if sees else ())]
    yield from lacks or not_found  # a missing package may explain the rest


def _trusts(model: Model, backend: Backend) -> Problem:
    return Problem(
        where=str(model.location),
        what=f"trust_remote_code=True of a Model, and the backend {backend.name!r}",
        why="that backend reads safetensors only, into classes of its own",
        fix="backend='torch', or save the model as safetensors of a known architecture",
    )


def _package_problems(backend: Backend, group: WorkerGroup, has: str) -> Iterator[Problem]:
    """Packages that the backend needs and the interpreter of the group's workers does not find."""
    where, own = str(group.location), f"python={str(group.python)!r}"
    answer = asked(backend.packages, group)
    if answer.silent:
        what, why = f"worker group {group.name!r} has {own}, which {answer.silent}", "its workers run with it"
        yield Problem(where=where, what=what, why=why, fix="name the interpreter of a virtual environment")
    for package in answer.missing:
        what, fix = f"{has}, which needs the package {package!r}", backend.install or f"install {package}"
        why = "it is not installed" if group.python is None else f"the group's {own} does not find it"
        yield Problem(
            where=where, what=what, why=why, fix=fix if group.python is None else f"in its environment, {fix}"
        )


def _pillow_problems(group: WorkerGroup) -> Iterator[Problem]:
    """Whether the workers of a group whose model sees images lack what reads these."""
    if asked(("PIL",), group).missing:
        yield Problem(
            where=str(group.location),
            what=f"worker group {group.name!r} has a model with images=True, which needs the package 'PIL'",
            why="it reads images, and is not installed",
            fix="pip install 'sluice-rl[vision]'",
        )


def asked(packages: Sequence[str], group: WorkerGroup) -> Answer:
    """What the interpreter of a group's workers answers: the group's own one, or else this process's."""
    if is_elsewhere():
        return Answer()
    if group.interpreter is None:
        return Answer(missing=tuple(package for package in packages if not is_installed(package)))
    return ask(group.interpreter, packages=packages)


def _import_problems(backend: Backend, group: WorkerGroup) -> Iterator[Problem]:
    """Why a function that is given as "module:function" cannot be imported and called."""
    for name, given, parameters in (
        ("opener", backend.opener, "context"),
        ("checks", backend.checks, "group, where"),
        ("fits", backend.fits, "group, config, where"),
    ):
        elsewhere = name == "opener" and group.interpreter is not None
        if isinstance(given, str) and not elsewhere and (wrong := import_fault(given, parameters)):
            yield Problem(
                where=str(group.location),
                what=f"backend {backend.name!r} has {name}={given!r}, which {wrong}",
                why=f"it is imported from there and called as {name}({parameters})",
                fix="correct it, or pass the function itself",
            )


def _own_checks(backend: Backend, group: WorkerGroup, stage: Stage | None, where: str) -> Iterator[Problem]:
    """What the backend's own checks find, of the group and of the stage's models on it, or that they fail."""
    known = [known_config(model) for model in (stage.uses if stage else ())]
    configs = [config for config in known if "model_type" in config and not shape_faults(config)]  # reported apart
    functions: tuple[tuple[str, Any, Sequence[tuple[Any, ...]], str], ...] = (
        ("checks", backend.checks, [()], "group, where"),
        ("fits", backend.fits, [(config,) for config in configs], "group, config, where"),
    )
    for name, own, given, parameters in functions:
        for more in given if own else ():
            yield from problems_of(
                partial(_call, own) if isinstance(own, str) else own,
                group,
                *more,
                where,
                says=f"{name} of backend {backend.name!r}",
                where=where,
                why="it yields the problems of a worker group",
                fix=f"correct {name}({parameters})",
            )


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it; of another machine, taken to be so."""
    if is_elsewhere():
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def _is_template(value: object) -> bool:
    """Whether this is no template, or one that Jinja reads."""
    if value is None:
        return True
    from jinja2 import Environment, TemplateSyntaxError

    try:
        return (
            isinstance(value, str)
            and bool(value)
            and bool(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(value))
        )
    except TemplateSyntaxError:
        return False


def model_problems(model: Model) -> Iterator[Problem]:
    """Check a model's description without loading the model."""
    where = str(model.location)
    for name, legal, why, fix in (
        ("source", isinstance(model.source, str) and model.source, "a model's source is a folder or a hub name",
         'Model("Qwen/Qwen3-0.6B")'),
        ("config", isinstance(model.config, Mapping | None), "a config is the dict of a Hugging Face config",
         "config={'model_type': 'qwen3', ...}"),
        ("alphabet", isinstance(model.alphabet, str | None), "an alphabet must be a string of characters, or 'bytes'",
         "alphabet='0123456789 ...'"),
        ("seed", is_whole(model.seed, 0) and model.seed < 2**63, "seed must be a whole number from 0 to 2**63 - 1",
         "seed=0"),
        ("warm_start", model.warm_start is None or callable(getattr(model.warm_start, "run", None)),
         "a warm start is a description with a method run(model, tokenizer, seed)",
         "warm_start=Supervised(task, steps=60)"),
        ("trust_remote_code", isinstance(model.trust_remote_code, bool), "trust_remote_code must be True or False",
         "trust_remote_code=False"),
        ("lora", isinstance(model.lora, LoRA | None), "an adapter is described by LoRA, or there is none",
         "lora=LoRA(rank=16)"),
        ("router_replay", isinstance(model.router_replay, bool), "router_replay must be True or False",
         "router_replay=True"),
        ("images", isinstance(model.images, bool), "images must be True or False", "images=False"),
        ("chat_template", _is_template(model.chat_template), "a chat template is a text in Jinja's language",
         "chat_template=None, for the tokenizer's own"),
    ):  # fmt: skip
        if not legal:
            what = f"{name}={shown(getattr(model, name))} of a Model"
            yield Problem(where=where, what=what, why=why, fix=fix)
            return
    if callable(getattr(model.warm_start, "problems", None)):
        kind = type(model.warm_start).__name__
        yield from problems_of(
            model.warm_start.problems,
            says=f"{kind}.problems()",
            where=where,
            why="it yields what, why and fix of each wrong parameter",
            fix=f"correct {kind}.problems()",
        )
    yield from list(image_problems(model)) or lora_problems(model)
    yield from mixture_problems(model)
    if model.config is None:
        yield from _folder_problems(model)
        return
    if "model_type" not in model.config:
        yield Problem(
            where=where,
            what=f"the config of model {model.source!r} has no 'model_type'",
            why="it names the architecture to build",
            fix="config={'model_type': 'qwen3', ...}",
        )
    for what, why in shape_faults(model.config):
        said = f"the config of model {model.source!r} has {what}"
        yield Problem(where=where, what=said, why=why, fix=f"correct {what.partition('=')[0]}")
    if not model.alphabet:
        yield Problem(
            where=where,
            what=f"model {model.source!r} has a config and no alphabet",
            why="a model built from a config has one token per character of its alphabet",
            fix="alphabet='0123456789 ...'",
        )
    elif len(set(model.alphabet)) != len(model.alphabet):
        yield Problem(
            where=where,
            what=f"the alphabet of model {model.source!r} has a character twice",
            why="each character is one token",
            fix="list each character once",
        )


def _folder_problems(model: Model) -> Iterator[Problem]:
    """What is wrong with a local folder; nothing if the source is a hub name."""
    folder, where = Path(model.source), str(model.location)
    try:
        is_here = (folder / "config.json").is_file()
    except OSError as error:
        if problem := refused(error, where):
            yield problem
        return
    if not is_here:
        if model.source.startswith((".", "/", "~")) or model.source.count("/") > 1 or folder.is_dir():
            what = f"the folder {model.source!r} " + ("has no config.json" if folder.is_dir() else "does not exist")
            yield Problem(where=where, what=what, why="a model is a folder or a hub name", fix="correct the path")
        elif "/" not in model.source and not is_elsewhere() and not in_hub_cache(model.source):
            yield unknown_name(model)
        return
    config, faults = read_config(folder / "config.json")
    faults += tokenizer_faults(folder)
    for fault in faults or weight_faults(folder, config):
        yield fault.problem(model)
    yield from code_problems(model)
    yield from [] if is_elsewhere() else lacking_problems(model)
