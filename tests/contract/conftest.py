"""The two data planes that the contract tests run against."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from pipeline import Field
from pipeline.data_plane.memory import MemoryPlane
from pipeline.data_plane.transfer_queue import TransferQueuePlane

torch.set_num_threads(1)

REWARD = Field("reward", "float32", low=-1e6, high=1e6)
TRUNCATED = Field("truncated", "bool")
COUNT = Field("count", "int32", "N 2 3")
IDS = Field("response_ids", "int64", "N T", unit="token", low=0, high=100)
LOGPROBS = Field("logprobs", "float32", "N T", unit="nat", high=0.0)
HALVES = Field("halves", "bfloat16", "N T")
PIXELS = Field("pixels", "float16", "N Q 2")
TEXT = Field("text", "str")
FIELDS = (REWARD, TRUNCATED, COUNT, IDS, LOGPROBS, HALVES, PIXELS, TEXT)

_numbers = itertools.count()


@dataclass
class Store:
    """One store with two clients: `plane` writes and `other` reads. In memory both are the same object."""

    kind: str
    plane: Any
    other: Any
    partition: str = field(default_factory=lambda: f"p{next(_numbers)}")

    def __post_init__(self) -> None:
        for plane in (self.plane, self.other):
            plane.register(self.partition, FIELDS, ["train", "prev"])

    def put(self, keys: Sequence[str], columns: dict, **options: Any) -> Any:
        """Put columns as the stage `work`."""
        return self.plane.put(keys, columns, partition=self.partition, stage="work", **options)


@pytest.fixture(scope="package")
def transfer_queue(ray_session: Any) -> Iterator[TransferQueuePlane]:
    """A client of the session's TransferQueue."""
    from pipeline.executors.ray import RayExecutor

    assert RayExecutor.store is not None
    plane = TransferQueuePlane.attach(replace(RayExecutor.store, deadline_s=20))
    yield plane
    plane.close()


@pytest.fixture(scope="package")
def uncached(transfer_queue: TransferQueuePlane) -> Iterator[TransferQueuePlane]:
    """A second client without a cache, so that it fetches everything, like another process."""
    plane = TransferQueuePlane.attach(replace(transfer_queue.settings, cache_bytes=0))
    yield plane
    plane.close()


@pytest.fixture(params=["memory", "transfer_queue"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Both stores in turn, each test in its own partition, which is drained afterwards."""
    if request.param == "memory":
        plane = MemoryPlane()
        yield Store("memory", plane, plane)
        return
    found = Store("transfer_queue", request.getfixturevalue("transfer_queue"), request.getfixturevalue("uncached"))
    yield found
    found.plane.drain()
    found.other.evict([])
