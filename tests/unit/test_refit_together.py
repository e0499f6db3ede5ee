"""Collective transports, run between threads of one process: planning is cached, and lost members end the wait."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ops.comm.stateless_group import GroupError
from ops.refit.layout import Layout, Tensor, dense
from ops.refit.transports import TRANSPORTS, Broadcast, Gloo, Transport, Tree
from ops.refit.transports.meeting import Meeting
from pipeline.declare.ranks import open_store
from pipeline.declare.task import MeetingPlace

CPU, ROWS, COLUMNS = torch.device("cpu"), 8, 6
TENSORS = {"w": Tensor((ROWS, COLUMNS), "int32"), "b": Tensor((ROWS,), "int32")}


def rank(start: int, stop: int) -> list[Any]:
    """Return the places of these rows of both tensors, one after the other in one buffer."""
    rows = stop - start
    return [
        dense("w", ((start, stop), (0, COLUMNS)), 4, "m"),
        dense("b", ((start, stop),), 4, "m", offset=4 * rows * COLUMNS),
    ]


SOURCE = Layout(TENSORS, [rank(0, 3), rank(3, 8)])
DESTINATION = Layout(TENSORS, [rank(0, 8), rank(0, 8), rank(0, 8)])


def held(start: int, stop: int, version: int) -> torch.Tensor:
    """Return the content of such a buffer at a version, as flat bytes."""
    w = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)[start:stop].flatten()
    return (torch.cat([w, torch.arange(start, stop)]) * version).int().view(torch.uint8)


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    """A store opened the way a run opens it."""
    yield open_store("127.0.0.1", 1, deadline_s=60.0)


class Members:
    """Two senders and three receivers, one thread each."""

    def __init__(self, store: dist.TCPStore, transports: Mapping[str, Transport] = TRANSPORTS) -> None:
        self.store = store
        self.meetings = [Meeting(CPU, i - 2 if i >= 2 else i, receives=i >= 2) for i in range(5)]
        self.receivers = {name: [each.receiver() for _ in range(5)] for name, each in transports.items()}
        self.senders = {name: [each.sender() for _ in range(5)] for name, each in transports.items()}
        self.buffers = [held(0, 3, 1), held(3, 8, 1), *(torch.zeros_like(held(0, 8, 1)) for _ in range(3))]

    def carry(
        self,
        index: int,
        transport: str,
        name: str,
        version: int,
        marks: tuple[str, ...] = ("a", "a"),
        wrong: bool = False,
    ) -> dict[str, float]:
        where = MeetingPlace(host="127.0.0.1", port=self.store.port, name=name, targets=(), deadline_s=30.0)
        receives = index >= 2
        if not receives:
            self.buffers[index].copy_(held(*((0, 3) if index == 0 else (3, 8)), version))
        meeting = self.meetings[index] = self.meetings[index].at(where, self.meetings[index].number)

        def move() -> dict[str, float]:
            if receives:
                return self.receivers[transport][index].receive(meeting, [], version)
            return self.senders[transport][index].send(meeting, version)

        destination, buffers = DESTINATION if receives else None, {"m": self.buffers[index]}
        return meeting.carry(version + wrong, SOURCE, destination, buffers, move, marks)

    def all(self, call: Callable[[int], Any], members: range = range(5)) -> list[Any]:
        """Return the result of the call on each member; an error is returned as a value."""

        def told(index: int) -> Any:
            try:
                return call(index)
            except (GroupError, ValueError) as error:
                return error

        with ThreadPoolExecutor(5) as pool:
            return list(pool.map(told, members))


@pytest.mark.parametrize("transport", ["gloo", "broadcast", "tree"])
def test_each_brings_the_same_and_looks_nothing_up_once_it_is_warm(store: Any, transport: str) -> None:
    members = Members(store)
    for version, marks in ((1, "a"), (2, "b"), (3, "a"), (4, "b")):
        records = members.all(lambda i: members.carry(i, transport, "first", version, (marks, marks)))  # noqa: B023
        assert all(torch.equal(memory, held(0, 8, version)) for memory in members.buffers[2:])
        assert [record["lookups"] > 0 for record in records] == [version < 3] * 5
        assert {record["received_bytes"] for record in records[2:]} == {len(held(0, 8, 1))}
        assert all(min(record[f"{part}_ms"] for part in ("meet", "plan", "move")) >= 0 for record in records)
        for memory in members.buffers[2:]:
            memory.fill_(0xEE)
    assert members.all(lambda i: members.carry(i, transport, "second", 5))[0]["lookups"] > 0, "others met anew"


@pytest.mark.parametrize("transport", [Gloo, Tree, Broadcast])
def test_each_uses_the_first_of_its_network_interfaces_that_is_up(
    store: Any, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no such")  # the default
    members = Members(store, {"own": transport(interfaces=("down", "lo")), "default": transport()})
    members.all(lambda i: members.carry(i, "own", "first", 1))
    assert all(torch.equal(memory, held(0, 8, 1)) for memory in members.buffers[2:])
    errors = members.all(lambda i: members.carry(i, "default", "second", 2))
    assert all(isinstance(error, GroupError) for error in errors)


def test_nobody_waits_for_one_that_is_known_to_be_lost(store: Any) -> None:
    members, begun_s = Members(store), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(members.all, lambda i: members.carry(i, "gloo", "first", 1), range(4))
        time.sleep(0.3)
        store.set("first", "worker sampler.2 died")
        answers = told.result()
    assert [type(answer) for answer in answers] == [GroupError] * 4 and time.monotonic() - begun_s < 10
    assert all("worker sampler.2 died" in str(answer) for answer in answers)
    assert members.all(lambda i: members.carry(i, "gloo", "next", 1))[0]["lookups"] > 0


@pytest.mark.parametrize("transport", ["gloo", "broadcast"])
def test_one_that_leaves_in_the_middle_ends_it_for_all(store: Any, transport: str) -> None:
    members = Members(store)
    members.all(lambda i: members.carry(i, transport, "first", 1))
    gather = Meeting._gather

    def leaves(self: Meeting, *given: Any) -> None:
        gather(self, *given)
        if self is members.meetings[3]:
            raise GroupError("out of here")

    Meeting._gather = leaves  # type: ignore[method-assign]
    try:
        begun_s = time.monotonic()
        answers = members.all(lambda i: members.carry(i, transport, "first", 2))
    finally:
        Meeting._gather = gather  # type: ignore[method-assign]
    assert any(isinstance(answer, GroupError) for answer in answers[:2]), "a sender has seen it"
    assert isinstance(answers[3], GroupError) and time.monotonic() - begun_s < 10


def test_who_plans_from_something_else_is_refused_before_anything_moves(store: Any) -> None:
    members = Members(store)
    answers = members.all(lambda i: members.carry(i, "gloo", "first", 1, wrong=i == 4))
    assert [type(answer) for answer in answers] == [ValueError] * 5
    assert "refit, rank 0: ranks [4] plan from other layouts or another version" in str(answers[0])
    assert not any(memory.any() for memory in members.buffers[2:])
