"""Weights as a one-rank trainer shares them, routes to a target worker, and the weight hash."""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from ops.refit.layout import Tensor, dense, whole
from ops.refit.share import Share
from ops.refit.transports import TRANSPORTS
from pipeline.declare.task import MeetingPlace
from stages.backends import Route
from stages.backends.refit.source import Source


def source_of(weights: Mapping[str, torch.Tensor]) -> Source:
    """Return the source of a trainer whose only rank has these weights."""
    tensors = {n: Tensor(tuple(w.shape), str(w.dtype).removeprefix("torch.")) for n, w in weights.items()}
    places = [dense(name, whole(tensor.shape), tensor.item_bytes, name) for name, tensor in tensors.items()]
    return Source(torch.device("cpu"), 0, tensors, places, weights)


def shares_of(weights: Mapping[str, torch.Tensor], *, near: bool = True) -> list[Share]:
    """Return one share with all weights."""
    return [source_of(weights).share(weights, TRANSPORTS["pull" if near else "messages"])]


def route_of(store: Any, name: str, transport: str = "gloo") -> Route:
    """Return the route to the only worker of a target, through this store."""
    return Route(
        TRANSPORTS[transport],
        MeetingPlace(host="127.0.0.1", port=store.port, name=name, targets=(0,), deadline_s=240.0),
    )


@contextmanager
def carried(source: Source, share: Share, version: int, route: Route) -> Iterator[Future[Mapping[str, float]]]:
    """Carry a share in a thread within the context. Yields the future of the metrics."""
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(source.carry, [share], version, route)
        yield sent
        sent.result()


def weight_hash(named: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 over name, dtype, shape and bytes of each CPU tensor, in order of the names."""
    found = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(hashlib.sha256(memoryview(raw)).digest())
    return found.hexdigest()
