"""Ranks that connect through NCCL when one of them is gone: no rank waits forever. NCCL is replaced by a fake."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ops.comm.stateless_group import GroupError, StatelessGroup
from ops.comm.store import Asking

CUDA = torch.device("cuda", 0)


class Communicator:
    """A fake that connects once `ended` is set and does not detect lost ranks."""

    ended = threading.Event()
    begun: list[int] = []
    aborted: list[Communicator] = []

    @classmethod
    def init(cls, ranks: int, rank: int, unique_id: bytes) -> Communicator:
        assert unique_id == b"an id"
        cls.begun.append(rank)
        assert cls.ended.wait(60)
        return cls()

    def abort(self) -> None:
        self.aborted.append(self)


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    core = ModuleType("nccl.core")
    core.get_unique_id = lambda: SimpleNamespace(as_bytes=b"an id")  # type: ignore[attr-defined]
    core.UniqueId = SimpleNamespace(from_bytes=bytes)  # type: ignore[attr-defined]
    core.Communicator = Communicator  # type: ignore[attr-defined]
    package = ModuleType("nccl")
    package.core = core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nccl", package)
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(Communicator, "ended", threading.Event())
    monkeypatch.setattr(Communicator, "begun", [])
    monkeypatch.setattr(Communicator, "aborted", [])
    yield
    Communicator.ended.set()


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def over(store: Any, rank: int, **flags: Any) -> StatelessGroup:
    return StatelessGroup.over(store, rank=rank, ranks=2, device=CUDA, **flags)


def test_a_rank_that_never_comes_is_told_before_anything_begins(store: Any) -> None:
    with pytest.raises(GroupError, match=r"rank 0 did not meet the other 1 at their store: .*rank 1 did not arrive in"):
        over(Asking(store, 0.5), 0, deadline_s=60.0)
    assert not Communicator.begun


def test_nobody_waits_for_a_rank_that_is_known_to_be_lost(store: Any) -> None:
    store.set("lost", "rank 1 died")
    with pytest.raises(GroupError, match="rank 1 died"):
        over(Asking(store, 60.0, over="lost"), 0, deadline_s=60.0)


def test_a_rank_that_dies_while_they_connect_is_told_and_what_comes_late_is_left(store: Any) -> None:
    store.set("group /rank 1", "")  # rank 1 arrived, then died
    with pytest.raises(GroupError, match=r"they did not connect within 0.5 s; one of them may be gone"):
        over(Asking(store, 60.0), 0, deadline_s=0.5)
    assert Communicator.begun == [0] and not Communicator.aborted
    thread = next(thread for thread in threading.enumerate() if thread.name == "connects")
    Communicator.ended.set()
    thread.join(60)
    assert len(Communicator.aborted) == 1


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")])
def test_nobody_connects_to_the_deadline_once_the_others_have_failed(
    store: Any, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    store.set("group /rank 1", "")
    asking = Asking(store, 60.0, over="failed")
    connecting = threading.Event()

    def connect(*_: Any) -> None:
        connecting.set()
        assert Communicator.ended.wait(60)

    monkeypatch.setattr(Communicator, "init", connect)
    monkeypatch.setattr(dist, "ProcessGroupGloo", connect)
    with ThreadPoolExecutor(1) as pool:
        group = pool.submit(
            StatelessGroup.over, asking, rank=0, ranks=2, device=device, deadline_s=60.0, reason=asking.reason
        )
        assert connecting.wait(20) and not group.done()
        failed_s = time.monotonic()
        store.set("failed", "rank 1 has no network")
        with pytest.raises(GroupError, match="rank 0 did not meet the other 1 at their store: rank 1 has no network"):
            group.result(20)
        assert time.monotonic() - failed_s < 5
        Communicator.ended.set()


def test_ranks_see_at_once_that_one_left_after_a_failed_transfer() -> None:
    """Rank 1 leaves while rank 0 sends to it and to rank 2. Rank 0 keeps the error and leaves too; rank 2, which comes
    later, must not wait for rank 0 until the deadline."""
    store = dist.HashStore()
    sending, failed = threading.Event(), threading.Event()
    kept: list[RuntimeError] = []

    def one(rank: int) -> float:
        group = StatelessGroup.over(
            Asking(store, 30.0), rank=rank, ranks=3, device=torch.device("cpu"), deadline_s=30.0
        )
        if rank == 1:
            assert sending.wait(20)
            group.abandon()
            return 0.0
        assert rank == 0 or failed.wait(20)
        begun_s = time.monotonic()
        try:
            with group.together():
                for peer in (1, 2) if rank == 0 else (0,):
                    (group.send if rank == 0 else group.recv)(torch.zeros(1 << 20), peer)
                sending.set()
        except RuntimeError as error:
            kept.append(error)
        group.abandon()
        failed.set()
        return time.monotonic() - begun_s

    with ThreadPoolExecutor(3) as pool:
        took_s = list(pool.map(one, range(3)))
    assert len(kept) == 2 and max(took_s) < 15


class NCCLError(Exception):
    """Like nccl4py's error, not a RuntimeError."""

    __module__ = "nccl.bindings.nccl"


def refused(*_: Any, **__: Any) -> None:
    raise NCCLError("ncclRemoteError")


def test_what_nccl_refuses_is_told(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set("group /rank 1", "")
    monkeypatch.setattr(Communicator, "init", refused)
    with pytest.raises(GroupError, match="rank 0 did not meet the other 1 at their store: NCCL: ncclRemoteError"):
        over(Asking(store, 60.0), 0, deadline_s=60.0)


def test_what_nccl_refuses_later_is_told_too(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("send", "recv", "broadcast"):
        monkeypatch.setattr(Communicator, call, refused, raising=False)
    monkeypatch.setattr(sys.modules["nccl.core"], "group", nullcontext, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(StatelessGroup, "check", lambda group, deadline_s: None)
    store.set("group /rank 1", "")
    Communicator.ended.set()
    group, tensor = over(Asking(store, 60.0), 0, deadline_s=60.0), torch.zeros(1)
    for call in (group.send, group.recv, group.broadcast):
        with pytest.raises(GroupError, match="NCCL: ncclRemoteError"), group.together():
            call(tensor, 1)
    with pytest.raises(ZeroDivisionError), group.together():
        1 / 0  # noqa: B018
