"""Weights by name as a trainer of one rank offers them."""

from collections.abc import Mapping

import torch

from ops.refit.layout import Tensor, dense, whole
from ops.refit.share import Publisher, Share


def publisher_of(weights: Mapping[str, torch.Tensor]) -> Publisher:
    """What publishes them."""
    tensors = {n: Tensor(tuple(w.shape), str(w.dtype).removeprefix("torch.")) for n, w in weights.items()}
    places = [dense(name, whole(tensor.shape), tensor.item_bytes, name) for name, tensor in tensors.items()]
    return Publisher(tensors, places, weights)


def shares_of(weights: Mapping[str, torch.Tensor], *, near: bool = True) -> list[Share]:
    """One share with all of them."""
    return [publisher_of(weights).publish(weights, near=near)]
