"""A model's configuration before it is loaded, and how fast the cost of a sample grows. Loads no model and no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ops.flops import Transformer, quadratic_cost
from pipeline import Model
from pipeline.reading import BROKEN


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


def _config(model: Model) -> Mapping[str, Any]:
    if model.config is not None:
        characters = 256 if model.alphabet == "bytes" else len(model.alphabet or "")
        return {"vocab_size": characters + 2, **model.config}  # padding, end of sequence
    return dict(json.loads((Path(model.source) / "config.json").read_text()))
