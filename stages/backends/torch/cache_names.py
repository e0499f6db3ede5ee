"""The parameter of transformers' functions that takes a cache: 5.24 has renamed it in most of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def cache_name(function: Callable[..., Any]) -> str:
    """Return the name of the parameter of a network's forward, or of a function that makes masks."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"
