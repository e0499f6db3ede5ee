"""A rank uses the first wanted network interface that is up, and groups really use it."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from ops.comm import nic as interface
from ops.comm.nic import choose, is_up
from ops.comm.stateless_group import GroupError, StatelessGroup
from ops.comm.store import Asking


def test_the_first_one_that_is_there_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_up("lo")
    assert choose(["no such", "lo", "eth0"]) == "lo"
    assert choose([]) == ""
    monkeypatch.setattr(interface, "is_up", lambda name: name != "lo")
    assert choose(["lo"]) == ""


def test_where_none_is_the_default_is_used_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [choose(["no such", "nor this"]) for _ in range(3)] == [""] * 3
    (said,) = caplog.messages
    assert said.startswith("none of the network interfaces ['no such', 'nor this'] exists and is up, so the default is")
    assert "'lo'" in said


def pair(store: dist.Store, name: str) -> list[list[float]]:
    """Return the values of two ranks after a transfer over an interface."""

    def one(rank: int) -> list[float]:
        asking = Asking(store, deadline_s=5)
        device, value = torch.device("cpu"), torch.full((3,), float(rank))
        with StatelessGroup.over(asking, rank=rank, ranks=2, device=device, interface=name, deadline_s=5) as group:
            (group.recv if rank else group.send)(value, 1 - rank)
        return value.tolist()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_a_group_goes_over_the_one_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no such")  # would be the default
    assert pair(store, "lo") == [[0.0] * 3] * 2
    with pytest.raises(GroupError, match="no such"):
        pair(dist.HashStore(), "")


def test_ranks_that_do_not_come_are_told_through_a_store_that_asks() -> None:
    asking = Asking(dist.HashStore(), deadline_s=0.2)
    with pytest.raises(GroupError, match="rank 1 did not meet the other 1 at their store"):
        StatelessGroup.over(asking, rank=1, ranks=2, device=torch.device("cpu"), deadline_s=0.2)
