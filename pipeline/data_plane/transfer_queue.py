"""The data plane over TransferQueue, which it starts and stops. Knows neither Ray nor stages.

    os.environ.update(environment())                      # before anything imports transfer_queue, in every process
    plane = TransferQueuePlane.create()                   # the driver, once Ray is connected
    plane = TransferQueuePlane.attach(settings)           # a worker; `settings` is `plane.settings` of the driver

It exposes nothing of transfer_queue. One TransferQueue row is a run of a group's samples (`rows`); a put costs three
round trips (names to indexes, data, production status), a get two, a clear three, in however many partitions (`actors`,
`messages`). Puts that arrive from several threads during a put share the next round trips, and so do gets and clears
(`batcher`, `exchange`). Every call runs on a separate loop with a deadline, because a client of a dead controller
blocks forever, and is retried if no reply comes (`patience`). A bounded cache keeps the rows a process wrote or
fetched, so stages that share a process fetch nothing.

TransferQueue's sockets unpickle what they receive, so messages are signed with a key of the run (`signed`), and the
sockets must bind a loopback address unless the network is trusted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from pipeline.data_plane import row_name
from pipeline.data_plane.actors import own_actors
from pipeline.data_plane.base import RowPlane, RowsOf
from pipeline.data_plane.batcher import Batcher, PlaneCall
from pipeline.data_plane.cache import RowCache
from pipeline.data_plane.checks import broken
from pipeline.data_plane.exchange import Exchange, Read, Remove, Write
from pipeline.data_plane.patience import ASKED, AbandonedError, Patience, StoreGoneError, in_thread
from pipeline.data_plane.rows import Block, block_of
from pipeline.data_plane.signed import KEY_BYTES, sign_messages
from pipeline.data_plane.uncompiled import uncompiled
from pipeline.data_plane.wire import TransferQueueWire
from pipeline.declare.handle import index_of
from pipeline.errors import DataPlaneError, DataPlaneLost, Problem

CACHE_BYTES = 256 * 2**20
DEADLINE_S = 90.0  # if the processes are alive; a dead one ends the wait
START_DEADLINE_S = 120.0  # Ray starts processes that import torch; on a busy machine this takes far longer than a call
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What a worker needs to attach, as plain values. An endpoint is (identity, address, ports by name); `key` signs
    the messages."""

    controller: tuple[str, str, dict[str, int]]
    storage: tuple[tuple[str, str, dict[str, int]], ...]
    deadline_s: float
    cache_bytes: int
    key: bytes = dataclasses.field(repr=False)

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        """The addresses of TransferQueue's processes, by their name in errors."""
        _, controller, ports = self.controller
        units = {f"TransferQueue's storage unit {name}": (at, own["put_get_socket"]) for name, at, own in self.storage}
        return {"TransferQueue's controller": (controller, ports["request_handle_socket"])} | units


def environment(deadline_s: float = DEADLINE_S) -> dict[str, str]:
    """Return environment variables for every process of the run; TransferQueue reads them at import.

    A request to a storage unit is tried `ASKED` times within the deadline.
    """
    return {
        "TQ_LOGGING_LEVEL": "ERROR",
        "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": str(max(1, round(deadline_s / ASKED))),
        "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": "1",
        "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": str(ASKED),
        "TQ_STORAGE_HANDSHAKE_MAX_RETRIES": "20",
    }


class TransferQueuePlane(RowPlane):
    """One process's client. Made by `create` (one per cluster; closing it stops TransferQueue) or `attach`."""

    _creator = threading.Lock()  # held while this process has created a TransferQueue

    def __init__(self, settings: Settings, *, owns: bool) -> None:
        """Use `create` or `attach`."""
        super().__init__()
        self.settings = settings
        self._owns = owns
        self._cache = RowCache(settings.cache_bytes)
        self._closed = False
        self._client = within(settings.deadline_s, "attach to TransferQueue", lambda: _connect(settings))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="data-plane")
        self._thread.start()
        self._patience = Patience(settings.addresses, settings.deadline_s)
        self._wire = TransferQueueWire(self._client, self._patience, self.counts)
        exchange, deadline_s = Exchange(self._wire), settings.deadline_s
        self._writes: Batcher[Write] = Batcher(self._loop, exchange.write, deadline_s)
        self._reads: Batcher[Read] = Batcher(self._loop, exchange.read, deadline_s)
        # indexes are reused, so two clears of the same rows must not interleave: they too go one batch at a time
        self._removals: Batcher[Remove] = Batcher(self._loop, exchange.remove, deadline_s)

    @staticmethod
    def create(
        *, deadline_s: float = DEADLINE_S, storage_units: int = 1, trusted_network: bool = False,
        cache_bytes: int = CACHE_BYTES, storage_resource: str | None = None, controller_resource: str | None = None,
    ) -> TransferQueuePlane:  # fmt: skip
        """Start TransferQueue in the Ray cluster that this process is connected to (with CPUs for 1 + storage_units).

        Storage units are spread over the nodes with the Ray resource `storage_resource`, or over all nodes; the
        controller is on a node with `controller_resource`, or on any.

        Raises DataPlaneError if the cluster already has one, or if it would bind a non-loopback address on an untrusted
        network; DataPlaneLost if it does not come up.
        """
        if not TransferQueuePlane._creator.acquire(blocking=False):
            raise _second()
        started = False
        try:
            settings = within(
                START_DEADLINE_S, "start TransferQueue",
                lambda: _start(
                    deadline_s, storage_units, trusted_network, cache_bytes, storage_resource, controller_resource
                ),
            )  # fmt: skip
            started = True
            return TransferQueuePlane(settings, owns=True)
        except BaseException:
            if started:
                within(START_DEADLINE_S, "stop TransferQueue", _stop)
            TransferQueuePlane._creator.release()
            raise

    @staticmethod
    def forget() -> None:
        """Stop the TransferQueue that `create` found and could not use, so that `create` can be called again."""
        within(START_DEADLINE_S, "stop TransferQueue", _stop)

    @staticmethod
    def attach(settings: Settings) -> TransferQueuePlane:
        """Connect to a TransferQueue that another process created. Needs no Ray. Raises DataPlaneLost on failure, at
        once if a process of it has ended."""
        try:
            Patience(settings.addresses, settings.deadline_s).look()
        except StoreGoneError as gone:
            raise _gone("attach to TransferQueue", gone) from gone
        return TransferQueuePlane(settings, owns=False)

    def _ask(self, what: str, batcher: Batcher, calls: Sequence[PlaneCall]) -> None:
        """Send calls with the batcher's next batch and wait for all replies. Raises the first error then: what is still
        under way would come after whatever its caller does next."""
        self._check_open(what)
        batcher.submit(*calls)
        errors = []
        for call in calls:
            try:
                self._wait(what, call.done)
            except DataPlaneLost:
                raise
            except DataPlaneError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _call(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the plane's loop."""
        if self._closed:
            work.close()
        self._check_open(what)
        return self._wait(what, asyncio.run_coroutine_threadsafe(work, self._loop))

    def _wait(self, what: str, future: Future[T]) -> T:
        """Return the reply. Raises DataPlaneLost at the deadline, or if a process of the store has ended."""
        try:
            return self._patience.wait(future)
        except StoreGoneError as gone:
            future.cancel()
            raise _gone(what, gone) from gone
        except TimeoutError as error:
            future.cancel()
            raise _late(what, self.settings.deadline_s) from error
        except RuntimeError as error:
            raise broken(
                what, f"TransferQueue refused: {error}", "its rows changed meanwhile, or a unit is out of memory",
                "see the cause above",
            ) from error  # fmt: skip

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise _closed(what)

    # rows

    def _write(self, parts: Mapping[str, Mapping[str, Block]], rows: tuple[str, ...], where: str) -> None:
        what = f"{where}: put {len(rows)} rows from {rows[0]} on"
        self._ask(what, self._writes, [Write(part, rows, blocks, where) for part, blocks in parts.items()])
        for part, blocks in parts.items():
            self._cache.keep(part, rows, blocks)

    def _read(self, wanted: Mapping[RowsOf, Sequence[str]], where: str) -> list[dict[str, Block]]:
        cached = [self._cache.get(part, rows, fields) for (part, rows), fields in wanted.items()]
        reads = [
            Read(part, rows, missing, where)
            for ((part, rows), fields), have in zip(wanted.items(), cached)
            if (missing := [field for field in fields if field not in have])
        ]
        self.counts["hits"] += sum(len(have) for have in cached)
        self.counts["misses"] += sum(len(call.fields) for call in reads)
        self._check_open(where)
        fetched = []
        with self._cache.fetching() as gone:
            if reads:
                self._reads.submit(*reads)
            for call in reads:
                what = f"{where}: get {', '.join(call.fields)} of {len(call.rows)} rows from {call.rows[0]} on"
                found = self._wait(what, call.done)
                blocks = {name: block_of(where, name, call.rows, values) for name, values in found.items()}
                self._cache.keep(call.partition, call.rows, blocks, gone)
                fetched.append(blocks)
        return [*cached, *fetched]

    def _remove(self, parts: Sequence[str], rows: Sequence[str]) -> None:
        what = f"clear {len(rows)} rows of {', '.join(map(repr, parts))}"
        self._ask(what, self._removals, [Remove(part, rows) for part in parts])
        self._cache.forget(rows, parts)  # after it: a get that began before keeps nothing

    # state of the store

    def presence(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], *, attempt: int = 0
    ) -> dict[str, list[bool]]:
        """Return which fields are present; see `DataPlane.presence`. Takes a few round trips per field.

        Only a dense field reveals how many samples a row holds: a ragged or str field counts for all keys of its group.
        """
        declared = self._declared(partition, f"presence in {partition!r}")
        rows = list(dict.fromkeys(row_name(key, attempt) for key in keys))
        if not rows:
            return {field: [] for field in fields}
        counts: dict[str, dict[str, int]] = {}
        for part, held_there in declared.divided(fields).items():
            what = f"presence of {', '.join(held_there)} in {part!r}"
            counts |= self._call(what, self._counts(part, rows, held_there))
        present = {}
        for field in fields:
            whole = declared.fields[field].ragged is not None or declared.fields[field].dtype == "str"
            held = [(counts[field].get(row_name(key, attempt)), index_of(key)) for key in keys]
            present[field] = [count is not None and (whole or index < count) for count, index in held]
        return present

    async def _counts(self, partition: str, rows: list[str], fields: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return field -> row that has it -> length of its first dimension (0 for texts)."""
        indexes, _ = await self._wire.find(partition, rows, create=False)
        if not indexes:
            return {field: {} for field in fields}
        names = dict(zip(indexes, await self._client.async_kv_retrieve_keys(indexes, partition)))
        counts: dict[str, dict[str, int]] = {}
        for field in fields:
            produced = await self._wire.produced(partition, [field])
            having = [name for index, name in names.items() if index in produced]
            schema = await self._wire.schema(partition, having, field) if having else {}
            shapes = schema.get("per_sample_shapes") or [schema.get("shape")] * len(having)
            counts[field] = {name: shape[0] if shape else 0 for name, shape in zip(having, shapes)}
        return counts

    def evict(self, rows: Sequence[str]) -> None:
        """Drop rows from this process's cache."""
        self._cache.forget(rows)

    def row_count(self, partition: str) -> int:
        """Return the number of rows that TransferQueue holds in the partition's parts."""
        what = f"count the rows of {partition!r}"
        listed = ((part, self._call(what, self._client.async_kv_list(part))) for part in self._parts(partition))
        return sum(len(rows.get(part, {})) for part, rows in listed)

    def drain(self) -> None:
        """Remove every row of every registered partition."""
        for name, declared in self._partitions.items():
            self._ask(f"drain {name!r}", self._removals, [Remove(part, None) for part in declared.parts])
        self._cache.forget_all()

    def close(self) -> None:
        """Stop the client and, in the process that created it, TransferQueue. Call it before Ray ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._cache.forget_all()
        for batcher in (self._writes, self._reads, self._removals):
            batcher.fail(_closed("data plane"))
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(self.settings.deadline_s)
        if not self._thread.is_alive():
            self._loop.close()
        self._client.close()
        if self._owns:
            try:
                within(START_DEADLINE_S, "stop TransferQueue", _stop)
            finally:
                TransferQueuePlane._creator.release()

    async def _end(self) -> None:
        """Cancel pending calls and stop the loop."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()


def within(deadline_s: float, what: str, work: Callable[[], T]) -> T:
    """Run blocking code in a thread; after the deadline abandon it and raise DataPlaneLost."""
    try:
        return in_thread(work, deadline_s, f"data-plane: {what}")
    except AbandonedError:
        raise _late(what, deadline_s) from None


def _load(deadline_s: float, key: bytes) -> None:
    """Import TransferQueue, with its environment; this process signs its messages with the key."""
    for name, value in environment(deadline_s).items():
        os.environ.setdefault(name, value)
    with uncompiled():
        import transfer_queue  # noqa: F401
    sign_messages(key)


def _start(
    deadline_s: float, storage_units: int, trusted_network: bool, cache_bytes: int, storage_resource: str | None,
    controller_resource: str | None,
) -> Settings:  # fmt: skip
    key = secrets.token_bytes(KEY_BYTES)
    _load(deadline_s, key)
    import transfer_queue
    from omegaconf import OmegaConf
    from transfer_queue import interface
    from transfer_queue.utils.zmq_utils import get_node_ip_address

    with suppress(ValueError):
        interface.ray.get_actor("TransferQueueController", namespace="transfer_queue")
        raise _second()
    _check_address(get_node_ip_address(), trusted_network)
    asked = OmegaConf.create(
        {
            "controller": {"polling_mode": True},  # a blocking fetch would stall the controller for everyone
            "backend": {
                "SimpleStorage": {
                    "num_data_storage_units": storage_units,
                    "required_node_resource": storage_resource,
                }
            },
        }
    )
    with own_actors(key, controller_resource):
        config = transfer_queue.init(asked)
    if config is asked or config.controller.zmq_info is None:  # it attached to one that started meanwhile
        transfer_queue.get_client().close()
        raise _second()
    controller = config.controller.zmq_info
    units = list(config.backend.SimpleStorage.zmq_info.values())
    try:
        for endpoint in (controller, *units):
            _check_address(endpoint.ip, trusted_network)
    except DataPlaneError:
        transfer_queue.close()
        raise
    plain = [(server.id, server.ip, dict(server.ports)) for server in (controller, *units)]
    return Settings(plain[0], tuple(plain[1:]), deadline_s, cache_bytes, key)


def _stop() -> None:
    import transfer_queue

    transfer_queue.close()


def _connect(settings: Settings) -> Any:
    _load(settings.deadline_s, settings.key)
    from omegaconf import OmegaConf
    from transfer_queue.client import AsyncTransferQueueClient
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    name, address, ports = settings.controller
    client = AsyncTransferQueueClient(
        client_id=f"sluice_{os.getpid()}_{uuid4().hex[:8]}",
        controller_info=ZMQServerInfo(Role.CONTROLLER, name, address, dict(ports)),
        zmq_io_threads=1,
    )
    units = {unit: ZMQServerInfo(Role.STORAGE, unit, at, dict(ports)) for unit, at, ports in settings.storage}
    start_s = time.monotonic()
    config = OmegaConf.create({"zmq_info": units}, flags={"allow_objects": True})
    try:
        client.initialize_storage_manager(manager_type="SimpleStorage", config=config)
    except BaseException as error:
        _close_handshake(error)
        client.close()
        if isinstance(error, TimeoutError):  # TransferQueue's own deadline
            raise _late("attach to TransferQueue", round(time.monotonic() - start_s)) from error
        raise
    return client


def _close_handshake(error: BaseException) -> None:
    """Close the ZeroMQ context of a handshake that failed. TransferQueue leaves it to the garbage collector, which
    would wait for the request to be sent, without an end."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if (context := frame.f_locals.get("sync_zmq_context")) is not None:
            context.destroy(linger=0)


def _check_address(address: str, trusted_network: bool) -> None:
    if not trusted_network and not ipaddress.ip_address(address).is_loopback:
        raise broken(
            "data plane", f"TransferQueue would listen on {address}",
            "its sockets unpickle what they receive, so anyone who reaches them can run code",
            "start Ray on a loopback address, or pass --trusted-network if only trusted machines reach the address",
        )  # fmt: skip


def _second() -> DataPlaneError:
    return broken(
        "data plane", "this Ray cluster already runs a TransferQueue", "one cluster serves one run",
        "end the other run, or start this one without joining its cluster",
    )  # fmt: skip


def _late(what: str, deadline_s: float) -> DataPlaneLost:
    return _lost(
        what, f"no answer within {deadline_s:g} s",
        "TransferQueue's controller or a storage unit hangs, cannot be reached, or is far too slow",
    )  # fmt: skip


def _gone(what: str, gone: StoreGoneError) -> DataPlaneLost:
    return _lost(what, f"{gone} is lost", "its process, or the machine that it ran on, has ended")


def _lost(where: str, what: str, why: str) -> DataPlaneLost:
    return DataPlaneLost(Problem(where=where, what=what, why=why, fix="resume the run"))


def _closed(what: str) -> DataPlaneError:
    return broken(what, "the data plane is closed", "a closed plane reads and writes nothing", "close it last")
