"""A group of processes that exchange tensors, independent of any other process group.

    with StatelessGroup.join("10.0.0.1", 29500, rank=0, ranks=8, device=torch.device("cuda", 0)) as group:
        with group.together():
            group.send(tensor, peer=3)

Rank 0 serves a key-value store where the ranks meet. On GPUs the group is a separate NCCL communicator (nccl4py), on
the CPU torch's gloo. Neither needs a default process group, so a trainer and a sampler can share one while each is in
others. Calls are ordered on the current CUDA stream.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

DEADLINE_S, POLL_S, LOOK_S = 300.0, 1e-4, 0.5
CHECKED = "first broadcast"


class GroupError(RuntimeError):
    """A group could not be formed, or a transfer in it failed."""


class GroupWire(Protocol):
    """The library that moves the bytes of a group."""

    def send(self, tensor: torch.Tensor, peer: int) -> None: ...

    def recv(self, tensor: torch.Tensor, peer: int) -> None: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> None: ...

    def together(self) -> Any: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class StatelessGroup:
    """One rank's view. The sends and receives inside one `together` complete at its end, so no order of them deadlocks.
    Every rank must issue its `together` blocks in the same order."""

    def __init__(
        self, wire: GroupWire, store: dist.Store, rank: int, ranks: int, device: torch.device,
        reason: Callable[[], str] = lambda: "",
    ) -> None:  # fmt: skip
        self.wire, self.store, self.rank, self.ranks, self.device = wire, store, rank, ranks, device
        self._reason = reason

    @classmethod
    def join(
        cls, host: str, port: int, *, rank: int, ranks: int, device: torch.device, name: str = "",
        interface: str = "", deadline_s: float = DEADLINE_S,
    ) -> StatelessGroup:  # fmt: skip
        """Join the group; every rank calls it. `name` distinguishes groups that share a store; `interface` is this
        rank's network interface, by default the one that gloo or NCCL finds.

        Raises GroupError if a rank does not arrive in time, or a test transfer fails.
        """
        try:
            store = dist.TCPStore(host, port, ranks, rank == 0, timedelta(seconds=deadline_s), wait_for_workers=False)
        except RuntimeError as error:
            raise _not_met(rank, ranks, f"{host}:{port}", error) from error
        return cls.over(
            store, rank=rank, ranks=ranks, device=device, name=name, interface=interface, deadline_s=deadline_s,
            where=f"{host}:{port}",
        )  # fmt: skip

    @classmethod
    def over(
        cls, store: dist.Store, *, rank: int, ranks: int, device: torch.device, name: str = "", interface: str = "",
        deadline_s: float = DEADLINE_S, where: str = "their store", reason: Callable[[], str] = lambda: "",
    ) -> StatelessGroup:  # fmt: skip
        """Join at a store that is already served. While joining, the store's own timeout applies too. `reason`, polled
        every `LOOK_S` while a rank waits for others, returns why that is pointless, or ""."""
        try:
            own = dist.PrefixStore(f"group {name}", store)
            if device.type == "cuda":
                wire: GroupWire = _NcclWire(own, rank, ranks, interface, device, deadline_s, reason)
            else:
                wire = _GlooWire(own, rank, ranks, interface, deadline_s, reason)
        except RuntimeError as error:
            raise _not_met(rank, ranks, where, error) from error
        group = cls(wire, own, rank, ranks, device, reason)
        group.check(deadline_s)
        return group

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a contiguous tensor."""
        self.wire.send(tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        """Receive into a contiguous tensor."""
        self.wire.recv(tensor, peer)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast from one rank to all; every rank calls it."""
        self.wire.broadcast(tensor, root)

    def together(self) -> Any:
        """Return a context in which sends and receives are issued as one."""
        return self.wire.together()

    def check(self, deadline_s: float = DEADLINE_S) -> None:
        """Test the group: rank 0 broadcasts a random number and every rank checks it. Raises GroupError if it is wrong,
        naming rank and key, or after the deadline."""
        if self.rank == 0:
            self.store.set(CHECKED, str(secrets.randbelow(2**53)))
        wanted = int(self.store.get(CHECKED))
        value = torch.full((2,), wanted if self.rank == 0 else -1, dtype=torch.int64, device=self.device)
        self.broadcast(value, 0)
        self.finish(deadline_s)
        if value.tolist() != [wanted, wanted]:
            raise GroupError(
                f"rank {self.rank} of {self.ranks}: the first broadcast delivered {value.tolist()}, but the store has "
                f"{wanted} under {CHECKED!r}; weights would be wrong too"
            )

    def finish(self, deadline_s: float) -> None:
        """Wait until all transfers on the current CUDA stream are done; on the CPU they already are. Raises GroupError
        after the deadline (a dead peer would block forever), or once there is a reason not to wait."""
        if self.device.type != "cuda":
            return
        begun_s = time.monotonic()
        done, looked_s = torch.cuda.current_stream(self.device).record_event(), begun_s
        while not done.query():
            now_s = time.monotonic()
            if now_s - begun_s > deadline_s:
                raise GroupError(f"rank {self.rank} of {self.ranks}: a transfer was not done within {deadline_s} s")
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                if reason := self._reason():
                    raise GroupError(f"rank {self.rank} of {self.ranks}, in the middle of a transfer: {reason}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Leave the group."""
        self.wire.close()

    def abandon(self) -> None:
        """Leave a broken group without waiting for the others."""
        self.wire.abandon()

    def __enter__(self) -> StatelessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _GlooWire:
    """torch's gloo without a default group. Sends and receives inside one `together` run concurrently."""

    def __init__(
        self, store: dist.Store, rank: int, ranks: int, interface: str, deadline_s: float, reason: Callable[[], str]
    ) -> None:
        deadline = timedelta(seconds=deadline_s)
        how: Any = deadline
        if interface:
            how = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            how._timeout = deadline
            how._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
        self._group: Any = _within(deadline_s, lambda: dist.ProcessGroupGloo(store, rank, ranks, how), reason)
        self._open: list[Any] | None = None

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._follow(self._group.send([tensor], peer, 0))

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._follow(self._group.recv([tensor], peer, 0))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._group.broadcast([tensor], options).wait()

    @contextmanager
    def together(self) -> Iterator[None]:
        works: list[Any] = []
        self._open = works
        try:
            yield
            for work in works:
                work.wait()
        finally:
            self._open = work = None
            works.clear()  # a failed transfer that its traceback keeps would hold the connections open after `abandon`

    def close(self) -> None:
        self._group = None

    abandon = close

    def _follow(self, work: Any) -> None:
        if self._open is None:
            work.wait()
        else:
            self._open.append(work)


@contextmanager
def _nccl_errors() -> Iterator[None]:
    """Turn NCCL errors into GroupError: nccl4py's errors have no public base class and are not RuntimeErrors."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "nccl":
            raise
        raise GroupError(f"NCCL: {error}") from error


class _NcclWire:
    """An nccl4py communicator. NCCL reads the interface once per process, at the first communicator; it takes the
    InfiniBand card from NCCL_IB_HCA."""

    @_nccl_errors()
    def __init__(
        self, store: dist.Store, rank: int, ranks: int, interface: str, device: torch.device, deadline_s: float,
        reason: Callable[[], str],
    ) -> None:  # fmt: skip
        if interface:
            os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # an exact match; otherwise it is a prefix
        import nccl.core as nccl

        if rank == 0:
            store.set("id", nccl.get_unique_id().as_bytes)
        self._nccl = nccl
        unique_id = nccl.UniqueId.from_bytes(bytes(store.get("id")))
        store.set(f"rank {rank}", "")
        store.wait([f"rank {each}" for each in range(ranks)])  # without all ranks, the next step would never finish
        index = torch.cuda.current_device() if device.index is None else device.index

        def connected() -> Any:
            with torch.cuda.device(index):
                return nccl.Communicator.init(ranks, rank, unique_id)

        self._communicator = _within(deadline_s, connected, reason, late=lambda communicator: communicator.abort())

    @_nccl_errors()
    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._communicator.send(tensor, peer, stream=_stream())

    @_nccl_errors()
    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._communicator.recv(tensor, peer, stream=_stream())

    @_nccl_errors()
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._communicator.broadcast(tensor, tensor, root, stream=_stream())

    @contextmanager
    def together(self) -> Iterator[None]:
        with _nccl_errors(), self._nccl.group():
            yield

    def close(self) -> None:
        self._communicator.destroy()

    def abandon(self) -> None:
        self._communicator.abort()


def _within(
    deadline_s: float, connected: Callable[[], Any], reason: Callable[[], str],
    late: Callable[[Any], None] = lambda made: None,
) -> Any:  # fmt: skip
    """Call `connected`, which waits for a lost peer far too long, with a deadline. Raises its exception, or
    RuntimeError after the deadline or once there is a reason not to wait; `late` is called with a result that arrives
    after that."""
    made: Future[Any] = Future()

    def run() -> None:
        made.set_running_or_notify_cancel()
        try:
            made.set_result(connected())
        except Exception as error:  # noqa: BLE001 - raised at the wait
            made.set_exception(error)

    threading.Thread(target=run, name="connects", daemon=True).start()
    ends_s = time.monotonic() + deadline_s
    why = ""
    while not why and (left_s := ends_s - time.monotonic()) > 0:
        if wait([made], timeout=min(left_s, LOOK_S)).done:
            return made.result()
        why = reason()
    made.add_done_callback(lambda done: late(done.result()) if done.exception() is None else None)
    raise RuntimeError(why or f"they did not connect within {deadline_s:g} s; one of them may be gone")


def _not_met(rank: int, ranks: int, where: str, error: RuntimeError) -> GroupError:
    return GroupError(f"rank {rank} did not meet the other {ranks - 1} at {where}: {error}")


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
