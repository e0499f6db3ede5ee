"""A model's configuration before it is loaded, and how fast the cost of a sample grows. Loads no model and no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ops.flops import Transformer, quadratic_cost
from pipeline import Model
from pipeline.declare.parameters import is_whole
from pipeline.errors import Problem, shown
from pipeline.reading import BROKEN, check_file, reason

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
FAMILIES = (*DENSE, *MIXTURES)
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # of deepseek_v3
_NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL = ("num_key_value_heads", "head_dim")


class FileFault(NamedTuple):
    """What is wrong with a file of a model, and why it matters."""

    file: Path
    what: str
    why: str

    def problem(self, model: Model) -> Problem:
        """Return it as an error of the model that has the file."""
        what, fix = f"{self.file}: {self.what}", "save or download the model again"
        return Problem(where=str(model.location), what=what, why=self.why, fix=fix)


def attention_cost(model: Model) -> float:
    """q, 1 / tokens: a sample of n tokens costs n + q n^2 tokens. 0.0 if the model's shape is unknown before it loads.

    It is known from the `config` of a `Model` or the config.json of a local folder, for the architectures of
    `ops.flops.Transformer`; attention counts as causal over the whole sample.
    """
    try:
        return quadratic_cost(Transformer.of(_config(model)))
    except (*BROKEN, TypeError, ArithmeticError):  # a wrong config is reported when the model is built
        return 0.0


def known_config(model: Model) -> Mapping[str, Any]:
    """Return the model's Hugging Face config, as far as it is known before the model is loaded; empty if it is not."""
    try:
        return _config(model)
    except (*BROKEN, TypeError):  # of a hub, or reported by `model_problems`
        return {}


def shape_faults(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is wrong, and why, with the numbers of a config, of the families that name them so. A number that is
    left out is not wrong."""
    if config.get("model_type") not in FAMILIES:
        return []
    given = {name: config[name] for name in (*_NUMBERS, *OPTIONAL) if name in config}
    wrong = [
        (f"{name}={shown(value)}", "it must be a whole number, 1 or more")
        for name, value in given.items()
        if not is_whole(value, 1) and not (value is None and name in OPTIONAL)
    ]
    heads, groups = given.get("num_attention_heads"), given.get("num_key_value_heads")
    if not wrong and heads and groups and heads % groups:
        wrong.append((f"num_attention_heads={heads}", f"it must be a multiple of num_key_value_heads={groups}"))
    return wrong


def uneven(number: int, what: str, by: str, ranks: int, where: str) -> Iterator[Problem]:
    """Why ranks cannot divide this number of parts of a model evenly."""
    if number % ranks:
        yield Problem(
            where=where,
            what=f"{by}={ranks} does not divide the model's {what} ({number})",
            why="all ranks hold equal parts",
            fix=f"use a divisor of {number}",
        )


def read_config(file: Path) -> tuple[Mapping[str, Any], list[FileFault]]:
    """Return a saved config and what is wrong with it. It must have its family's numbers: transformers would take those
    of another model in their place."""
    describes = "it describes the model"
    try:
        check_file(file)
        config = json.loads(file.read_bytes())
    except BROKEN as error:
        return {}, [FileFault(file, f"it cannot be read: {reason(error)}", describes)]
    if not (isinstance(config, dict) and "model_type" in config):
        return {}, [FileFault(file, "it has no 'model_type'", describes)]
    absent = [name for name in _NUMBERS if name not in config] if config["model_type"] in FAMILIES else []
    faults = [FileFault(file, f"it has no {', '.join(map(repr, absent))}", describes)] if absent else []
    return config, faults + [FileFault(file, what, why) for what, why in shape_faults(config)]


def _config(model: Model) -> Mapping[str, Any]:
    if model.config is not None:
        characters = 256 if model.alphabet == "bytes" else len(model.alphabet or "")
        return {"vocab_size": characters + 2, **model.config}  # padding, end of sequence
    file = Path(model.source) / "config.json"
    check_file(file)
    return dict(json.loads(file.read_text()))
