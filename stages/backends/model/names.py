"""What a model's folder calls the tensors of a transformers network. Knows names only.

in_folder(network, "model.layers.0.mixer.in_proj.weight")     # of NemotronH: "backbone.layers.0.mixer.in_proj.weight"
"""

from __future__ import annotations

from torch import nn

PREFIXES = {"nemotron_h": ("model.", "backbone.")}  # of the state and of the folder, where they differ


def in_folder(network: nn.Module, name: str) -> str:
    """The name in the model's folder of a tensor of the network's state."""
    mine, theirs = PREFIXES.get(getattr(getattr(network, "config", None), "model_type", ""), ("", ""))
    return theirs + name.removeprefix(mine) if mine and name.startswith(mine) else name
