"""The memory that a refit keeps and uses, counted by hand for each transport."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ops.refit.layout import Tensor, dense, whole
from ops.refit.ledger import Ledger
from ops.refit.share import Share, layout_of
from ops.refit.transports import TRANSPORTS, Broadcast, Gloo, Receiver, Sender, Transport, Tree
from ops.refit.transports.meeting import Meeting
from pipeline import StageError
from pipeline.declare.ranks import open_store
from stages.backends import Route
from stages.backends.refit.source import Source
from stages.backends.refit.target import Target
from tests.shares import carried, route_of, source_of

CPU = torch.device("cpu")
WEIGHTS = {"a": torch.arange(100.0), "b": torch.ones(30, 10)}  # 400 and 1,200 bytes
COPY = 512 + 1280  # of a rank's part: every parameter begins at a multiple of 256 bytes
MESSAGE = 400 + 1200  # a copy begins at a multiple of 16 bytes, and 400 is one
BUCKET = 512 + 1200  # a tensor begins at a multiple of 256 bytes


def test_memory_counts_until_its_last_view_is_gone() -> None:
    ledger = Ledger(CPU)
    memory = ledger.empty(1000)
    view = memory.view(torch.int64)[3:5]
    del memory
    assert ledger.record("source") == {"kept_bytes_source": 1000.0, "peak_bytes_source": 1000.0}
    del view
    assert ledger.record("source") == {"kept_bytes_source": 0.0, "peak_bytes_source": 1000.0}


def test_the_peak_is_that_of_a_version() -> None:
    ledger = Ledger(CPU)
    kept = ledger.empty(100)
    ledger.empty(50)
    assert ledger.record("target")["peak_bytes_target"] == 150
    ledger.begin()
    assert ledger.record("target")["peak_bytes_target"] == 100
    ledger.briefly(7)
    ledger.briefly(3)
    assert ledger.record("target") == {"kept_bytes_target": 100.0, "peak_bytes_target": 107.0}
    assert len(kept) == 100 and kept.dtype == torch.uint8


@pytest.fixture
def store() -> Iterator[Any]:
    yield open_store("127.0.0.1", 1, deadline_s=60.0)


def routed(store: Any, transport: Transport) -> Route:
    """Return the route of a transport on which nobody waits long."""
    meeting = route_of(store, "refit").meeting
    assert meeting is not None
    return Route(transport, replace(meeting, deadline_s=10.0))


def refitted(store: Any, transport: Transport, versions: int = 3) -> list[Mapping[str, float]]:
    """Return the memory of both sides of one worker each, for each version."""
    tensors = {name: Tensor(tuple(tensor.shape), "float32") for name, tensor in WEIGHTS.items()}
    places = [dense(name, whole(tensor.shape), 4, name) for name, tensor in tensors.items()]
    held = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    source, target = Source(CPU, 0, tensors, places, weights), Target(tensors, [places], 0, held)
    found: list[Mapping[str, float]] = []
    for version in range(versions):
        for tensor in weights.values():
            tensor.add_(1.0)
        share = source.share(weights, transport)
        route = routed(store, transport) if transport.both_carry else Route(transport)
        with carried(source, share, version, route) if route.meeting else nullcontext(share.record) as sent:
            received = target.receive([share], version, route)
        sent = sent.result() if route.meeting else sent
        names = ("kept_bytes", "peak_bytes")
        record = {**sent, **received.record}
        found.append({f"{name}_{side}": record[f"{name}_{side}"] for name in names for side in ("source", "target")})
        assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())
    target.close()
    return found


BOTH = 2 * COPY  # on a CPU the version before stays readable


@pytest.mark.parametrize(
    ("transport", "source", "target"),
    [
        (TRANSPORTS["pull"], (BOTH, BOTH), (0, 0)),
        (TRANSPORTS["messages"], (BOTH, BOTH + COPY), (0, 0)),
        (TRANSPORTS["golden"], (BOTH, BOTH + COPY), (0, 1200)),
        (Gloo(), (BOTH + 2 * MESSAGE,) * 2, (2 * MESSAGE,) * 2),
        (Gloo(slot_bytes=1200), (BOTH + 2 * 2 * 1200,) * 2, (2 * 2 * 1200,) * 2),  # two slots, as long as the longest
        (Gloo(slot_bytes=1200, slots=1), (BOTH + 2 * 1200,) * 2, (2 * 1200,) * 2),
        (Tree(slot_bytes=1200, slots=1), (BOTH + 2 * 1200,) * 2, (2 * 1200,) * 2),
        (Broadcast(), (BOTH + 2 * BUCKET,) * 2, (2 * BUCKET,) * 2),
        (Broadcast(bucket_bytes=1200, buckets=1), (BOTH + 2 * 1200,) * 2, (2 * 1200,) * 2),
        (Gloo(keep_copy=False), (MESSAGE,) * 2, (MESSAGE,) * 2),  # no copy, and one message instead of one per copy
        (Tree(keep_copy=False), (MESSAGE,) * 2, (MESSAGE,) * 2),
        (Broadcast(keep_copy=False), (BUCKET,) * 2, (BUCKET,) * 2),
    ],
    ids=str,
)
def test_kept_and_peak_bytes_of_both_sides(
    store: Any, transport: Transport, source: tuple[int, int], target: tuple[int, int]
) -> None:
    last = refitted(store, transport)[-1]
    assert (last["kept_bytes_source"], last["peak_bytes_source"]) == source
    assert (last["kept_bytes_target"], last["peak_bytes_target"]) == target


class Sends(Sender):
    """Sends parameters without a message in between."""

    def send(self, meeting: Meeting, version: int) -> dict[str, float]:
        for name in sorted(WEIGHTS):
            meeting.group().send(meeting.buffers[name], 1)
        return {}


class Receives(Receiver):
    def receive(self, meeting: Meeting, shares: Sequence[Share], version: int) -> dict[str, float]:
        for name in sorted(WEIGHTS):
            meeting.group().recv(meeting.buffers[name], 0)
        return {}


class Straight(Transport):
    name = "straight"
    both_carry = True
    keep_copy = False
    sender, receiver = Sends, Receives  # type: ignore[assignment]


def test_a_sender_that_reads_the_parameters_keeps_nothing(store: Any) -> None:
    assert set(refitted(store, Straight())[-1].values()) == {0.0}


def source_and_share(weights: dict[str, torch.Tensor], transport: Transport) -> tuple[Source, Share]:
    source = source_of(weights)
    return source, source.share(weights, transport)


def test_weights_that_have_changed_are_not_sent_again_as_an_earlier_version(store: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    source, share = source_and_share(weights, Gloo(keep_copy=False))
    held = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    tensors = layout_of([share]).tensors
    target = Target(tensors, [[dense(name, whole(tensor.shape), 4, name) for name, tensor in tensors.items()]], 0, held)
    route = routed(store, Gloo(keep_copy=False))
    for _ in range(2):  # the same weights may be sent again
        with carried(source, share, 7, route):
            target.receive([share], 7, route)
    elsewhere = source_and_share(weights, Gloo(keep_copy=False))[1]
    with pytest.raises(ValueError, match="mark"):
        source.carry([elsewhere], 7, route)
    weights["a"][3] += 1
    for offered in (False, True):  # also when the next version has been offered already
        if offered:
            source.share(weights, Gloo(keep_copy=False))
        with pytest.raises(StageError, match="needs version 7 again, and the trainer has changed its weights"):
            source.carry([share], 7, route)


def test_a_parameter_that_is_converted_needs_a_copy() -> None:
    tensors = {"a": Tensor((4,), "bfloat16")}
    source = Source(CPU, 0, tensors, [dense("a", whole((4,)), 2, "own a")], {"own a": torch.ones(4)})
    with pytest.raises(StageError, match=r"'own a' is torch.float32 in training and torch.bfloat16 in the refit"):
        source.share({"own a": torch.ones(4)}, Gloo(keep_copy=False))
    assert source.share({"own a": torch.ones(4)}, Gloo()).model_bytes == 8
