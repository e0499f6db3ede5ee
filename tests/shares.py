"""Weights by name as a trainer of one rank offers them."""

from collections.abc import Mapping

import torch

from ops.refit.layout import Tensor, dense, whole
from ops.refit.share import Publisher, Share


def shares_of(weights: Mapping[str, torch.Tensor], *, near: bool = True) -> list[Share]:
    """One share with all of them."""
    tensors = {n: Tensor(tuple(w.shape), str(w.dtype).removeprefix("torch.")) for n, w in weights.items()}
    places = [dense(name, whole(tensor.shape), tensor.item_bytes, name) for name, tensor in tensors.items()]
    return [Publisher(tensors, places, weights).publish(weights, near=near)]
