"""A group of processes that send tensors to each other, whatever other groups they are in.

    with StatelessGroup.join("10.0.0.1", 29500, rank=0, ranks=8, device=torch.device("cuda", 0)) as group:
        with group.together():
            group.send(tensor, peer=3)

Rank 0 serves a key-value store where the ranks meet. On GPUs it is a NCCL communicator of its own (nccl4py), on the CPU
torch's gloo; neither is, nor needs, a default process group, so a trainer and a sampler can share one though each is in
others. Streams are given: a call is done in the order of the current one.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

DEADLINE_S, POLL_S, LOOK_S = 300.0, 1e-4, 0.5
CHECKED = "first broadcast"


class GroupError(RuntimeError):
    """A group that did not come together, or does not carry what it is given."""


class Wire(Protocol):
    """What carries the bytes of a group."""

    def send(self, tensor: torch.Tensor, peer: int) -> None: ...

    def recv(self, tensor: torch.Tensor, peer: int) -> None: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> None: ...

    def together(self) -> Any: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class StatelessGroup:
    """One rank's view. `send` and `recv` of one `together` wait for each other only at its end, so that no order of
    them locks up; every rank issues the `together`s that it has a part in in the same order."""

    def __init__(self, wire: Wire, store: dist.Store, rank: int, ranks: int, device: torch.device) -> None:
        self.wire, self.store, self.rank, self.ranks, self.device = wire, store, rank, ranks, device

    @classmethod
    def join(
        cls, host: str, port: int, *, rank: int, ranks: int, device: torch.device, name: str = "",
        interface: str = "", deadline_s: float = DEADLINE_S,
    ) -> StatelessGroup:  # fmt: skip
        """Meet the others, which all call it. `name` tells groups apart that meet at one store; `interface` is the
        network interface of this rank, by default the one that gloo or NCCL finds.

        Raises GroupError where they do not come in time, or the group does not carry what it is given.
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
        deadline_s: float = DEADLINE_S, where: str = "their store",
    ) -> StatelessGroup:  # fmt: skip
        """The same at a store that somebody serves already; while they meet, its own timeout holds too."""
        try:
            own = dist.PrefixStore(f"group {name}", store)
            if device.type == "cuda":
                wire: Wire = _Nccl(own, rank, ranks, interface, device, deadline_s)
            else:
                wire = _Gloo(own, rank, ranks, timedelta(seconds=deadline_s), interface)
        except RuntimeError as error:
            raise _not_met(rank, ranks, where, error) from error
        group = cls(wire, own, rank, ranks, device)
        group.check(deadline_s)
        return group

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a contiguous tensor."""
        self.wire.send(tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        """Receive into a contiguous tensor."""
        self.wire.recv(tensor, peer)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """From one rank to all; every rank calls it."""
        self.wire.broadcast(tensor, root)

    def together(self) -> Any:
        """A context in which sends and receives are issued as one."""
        return self.wire.together()

    def check(self, deadline_s: float = DEADLINE_S) -> None:
        """Rank 0 broadcasts a number that it chose, which all must have then. Raises GroupError naming rank and key, or
        where it takes longer."""
        if self.rank == 0:
            self.store.set(CHECKED, str(secrets.randbelow(2**53)))
        wanted = int(self.store.get(CHECKED))
        value = torch.full((2,), wanted if self.rank == 0 else -1, dtype=torch.int64, device=self.device)
        self.broadcast(value, 0)
        self.finish(deadline_s)
        if value.tolist() != [wanted, wanted]:
            raise GroupError(
                f"rank {self.rank} of {self.ranks}: the first broadcast brought {value.tolist()}, and the store has "
                f"{wanted} under {CHECKED!r}; weights would go the same way"
            )

    def finish(self, deadline_s: float, over: Callable[[], bool] = lambda: False) -> None:
        """Wait until what was sent and received on a GPU, on its current stream, is done; on the CPU it is. Raises
        GroupError where it takes longer, as it does without an end where a peer died, or where `over` says so, which
        is asked every `LOOK_S`."""
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
                if over():
                    raise GroupError(f"rank {self.rank} of {self.ranks}: a peer is gone in the middle of a transfer")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Leave the group."""
        self.wire.close()

    def abandon(self) -> None:
        """Leave a group that does not work any more, without the others."""
        self.wire.abandon()

    def __enter__(self) -> StatelessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Gloo:
    """torch's gloo, without a default group. Sends and receives of one `together` run beside each other."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, deadline: timedelta, interface: str) -> None:
        if interface:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = deadline
            options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
            self._group: Any = dist.ProcessGroupGloo(store, rank, ranks, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, ranks, deadline)
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
        self._open = []
        try:
            yield
            for work in self._open:
                work.wait()
        finally:
            self._open = None

    def close(self) -> None:
        self._group = None

    abandon = close

    def _follow(self, work: Any) -> None:
        if self._open is None:
            work.wait()
        else:
            self._open.append(work)


@contextmanager
def _told() -> Iterator[None]:
    """What NCCL refuses as GroupError: nccl4py's own errors have no public base, and are no RuntimeErrors."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "nccl":
            raise
        raise GroupError(f"NCCL: {error}") from error


class _Nccl:
    """A communicator of nccl4py. NCCL reads which interface it is to use once a process, at its first communicator;
    an InfiniBand card it takes from NCCL_IB_HCA."""

    @_told()
    def __init__(
        self, store: dist.Store, rank: int, ranks: int, interface: str, device: torch.device, deadline_s: float
    ) -> None:
        if interface:
            os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # that very one; else it is a prefix
        import nccl.core as nccl

        if rank == 0:
            store.set("id", nccl.get_unique_id().as_bytes)
        self._nccl = nccl
        unique_id = nccl.UniqueId.from_bytes(bytes(store.get("id")))
        store.set(f"rank {rank}", "")
        store.wait([f"rank {each}" for each in range(ranks)])  # nobody begins what one that never came would not end
        index = torch.cuda.current_device() if device.index is None else device.index

        def connected() -> Any:
            with torch.cuda.device(index):
                return nccl.Communicator.init(ranks, rank, unique_id)

        self._communicator = _within(deadline_s, connected, late=lambda communicator: communicator.abort())

    @_told()
    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._communicator.send(tensor, peer, stream=_stream())

    @_told()
    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._communicator.recv(tensor, peer, stream=_stream())

    @_told()
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._communicator.broadcast(tensor, tensor, root, stream=_stream())

    @contextmanager
    def together(self) -> Iterator[None]:
        with _told(), self._nccl.group():
            yield

    def close(self) -> None:
        self._communicator.destroy()

    def abandon(self) -> None:
        self._communicator.abort()


def _within(deadline_s: float, connected: Callable[[], Any], late: Callable[[Any], None]) -> Any:
    """What `connected` returns, which waits without an end where a peer dies. Raises what it raises, and
    RuntimeError where it takes longer; `late` gets what comes after all."""
    made: Future[Any] = Future()

    def run() -> None:
        made.set_running_or_notify_cancel()
        try:
            made.set_result(connected())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            made.set_exception(error)

    threading.Thread(target=run, name="connects", daemon=True).start()
    try:
        return made.result(deadline_s)
    except TimeoutError:
        made.add_done_callback(lambda done: late(done.result()) if done.exception() is None else None)
        raise RuntimeError(f"they did not connect within {deadline_s:g} s; one of them may be gone") from None


def _not_met(rank: int, ranks: int, where: str, error: RuntimeError) -> GroupError:
    return GroupError(f"rank {rank} did not meet the other {ranks - 1} at {where}: {error}")


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
