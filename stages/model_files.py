"""Files of a model: those that run code when they are loaded, and those that it lacks. Reads names and JSON; loads no
model and no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

import msgspec

from pipeline import Model, StageError
from pipeline.errors import Problem
from pipeline.reading import BROKEN, check_file, check_files, decode, readable, reason
from stages.model_shape import FileFault

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")  # any of these may be a whole one
_NAMES_CODE = ("config.json", "tokenizer_config.json")


def in_hub_cache(name: str) -> bool:
    """Whether the hub's cache on this machine has files of a model, which then loads without a network."""
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir()


def unknown_name(model: Model) -> Problem:
    """The problem of a name without an owner that is no folder either."""
    folders = [path.parent.name for path in Path().glob("*/config.json")]
    near = get_close_matches(model.source, folders, n=1)
    return Problem(
        where=str(model.location),
        what=f"the model {model.source!r} is no folder, and no name of the hub, which has an owner",
        why="a model is a folder or a hub name",
        fix=f"did you mean {near[0]!r}?" if near else "name a folder, or a model with its owner, as Qwen/Qwen3-0.6B",
    )


def code_problems(model: Model) -> Iterator[Problem]:
    """Reasons why loading a local folder would run code that comes with it; none if the Model trusts it."""
    folder = Path(model.source)
    if model.trust_remote_code or model.config is not None or not folder.is_dir():
        return
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled and not any(folder.glob("*.safetensors")):
        yield Problem(
            where=str(model.location),
            what=f"the folder {model.source!r} has its weights in {pickled[0]}, and no safetensors",
            why="that file is a pickle, and reading a pickle can run code",
            fix="save the model as safetensors, or Model(..., trust_remote_code=True) if you trust the folder",
        )
    for name in _NAMES_CODE:
        if code := _named_code(folder / name):
            yield Problem(
                where=str(model.location),
                what=f"{name} of the folder {model.source!r} names code of its own: auto_map has {code}",
                why="the code of a folder runs in every worker that loads it",
                fix="remove auto_map, so that transformers' own class loads, or Model(..., trust_remote_code=True) if "
                "you trust the folder",
            )


def lacking_problems(model: Model) -> Iterator[Problem]:
    """Files without which no local folder can be loaded: weights, and those of a tokenizer."""
    folder = Path(model.source)
    for what, patterns in (("weights", ("*.safetensors", *_PICKLED)), ("tokenizer", _TOKENIZERS)):
        if not any(path for pattern in patterns for path in folder.glob(pattern)):
            yield Problem(
                where=str(model.location),
                what=f"the folder {model.source!r} has a config.json and no {what}",
                why="a model is loaded from its config, weights and tokenizer",
                fix=f"save_pretrained({model.source!r}) of the {'tokenizer' if what == 'tokenizer' else 'model'} too",
            )


def untemplated(model: Model) -> Iterator[Problem]:
    """The problem of a model whose tokenizer has no chat template, as far as that is known before it loads."""
    folder, config = Path(model.source), Path(model.source) / "tokenizer_config.json"
    if model.chat_template is not None or any(folder.glob("chat_template.*")):
        return
    if model.config is None:
        try:
            found = json.loads(config.read_bytes())
        except BROKEN:  # of a hub, or reported apart
            return
        if not isinstance(found, dict) or found.get("chat_template") is not None:
            return
    yield Problem(
        where=str(model.location),
        what=f"the tokenizer of {model.source!r} has no chat template",
        why="the template turns messages into a prompt",
        fix="a chat model, Model(..., chat_template=...) in Jinja's language, or texts in the place of messages",
    )


def tokenizer_faults(folder: Path) -> list[FileFault]:
    """Return which JSON files of a folder's tokenizer cannot be read."""
    faults = []
    for name, read in (("tokenizer.json", _read_large), ("tokenizer_config.json", _read_small)):
        if (file := folder / name).exists():
            try:
                check_file(file)
                read(file.read_bytes())
            except BROKEN as error:
                faults.append(FileFault(file, f"it cannot be read: {reason(error)}", "it has the model's tokenizer"))
    return faults


def _read_large(data: bytes) -> None:
    """Check a JSON object without building it: every stage of a model asks, and a vocabulary has many megabytes."""
    decode(data, dict[str, msgspec.Raw])


def _read_small(data: bytes) -> None:
    """Check a JSON object as transformers reads it, by Python's rules."""
    if not isinstance(json.loads(data), dict):
        raise ValueError("it is no JSON object")


def refuse_code(model: Model) -> None:
    """Raise StageError if loading the model would run code that comes with it, or wait for a pipe."""
    if model.config is None and (folder := Path(model.source)).is_dir():
        with readable(folder, StageError, why="a model is a folder of files", fix="save or download the model again"):
            check_files(folder)
    if problems := list(code_problems(model)):
        raise StageError(*problems)


def _named_code(file: Path) -> str:
    """The first code that a configuration names; "" if none, or if it cannot be read, which is reported elsewhere."""
    try:
        found = json.loads(file.read_bytes()) if file.is_file() else {}
    except BROKEN:
        return ""
    named = found.get("auto_map") if isinstance(found, dict) else None
    named = named.values() if isinstance(named, dict) else [named] if named else []
    return next((str(code) for code in named), "")
