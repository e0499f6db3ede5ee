"""Tensors of a model that keep their own precision, whatever that of the weights is. Knows names only."""

from __future__ import annotations

KEPT = {"e_score_correction_bias": "float32"}  # rounded, it would choose other experts; engines keep it, too


def kept_dtype(name: str) -> str:
    """The dtype, by torch's name, that a tensor of a Hugging Face folder keeps; "" if it has that of the weights."""
    return KEPT.get(name.rpartition(".")[2], "")
