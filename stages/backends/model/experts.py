"""A layer's experts as one tensor, for layouts; the first dimension is the expert. Knows names only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def single(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """The folder's tensors behind a fused one: one per expert."""
    if "experts.*." not in name:
        yield name, tensor
        return
    for expert in range(len(tensor)):
        yield name.replace("experts.*.", f"experts.{expert}."), tensor[expert]


def of_expert(name: str) -> tuple[str, int | None]:
    """The fused tensor that an expert's tensor belongs to, and the expert's index; None for other tensors.

    "model.layers.0.mlp.experts.7.up_proj.weight" is number 7 of "model.layers.0.mlp.experts.*.up_proj.weight".
    """
    found = _EXPERT.search(name)
    return (_EXPERT.sub(".experts.*.", name), int(found[1])) if found else (name, None)
