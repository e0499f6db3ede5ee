"""The data plane over TransferQueue. The one module that imports it; knows nothing of Ray and nothing of stages.

    os.environ.update(environment())                      # before anything imports transfer_queue, in every process
    plane = TransferQueuePlane.create()                   # the driver, once Ray is connected
    plane = TransferQueuePlane.attach(settings)           # a worker; `settings` is `plane.settings` of the driver

Nothing of transfer_queue is handed out. One row of TransferQueue is one run of a group's samples (`rows`); a put costs
three round trips (names to indexes, data, production status), a get two. Every call runs on a loop of its own
with a deadline, because a client of a dead controller waits without bound. What a process wrote or fetched
stays in a bounded cache, so stages that share a process fetch nothing.

TransferQueue's sockets unpickle what they receive, so they must bind a loopback address unless the network is trusted.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar
from uuid import uuid4

from pipeline.data_plane import row_name
from pipeline.data_plane.base import RowPlane, absent, conflict
from pipeline.data_plane.cache import RowCache
from pipeline.data_plane.checks import broken
from pipeline.data_plane.rows import Block, same_bytes
from pipeline.errors import DataPlaneError, DataPlaneLost, Problem

CACHE_BYTES = 256 * 2**20
DEADLINE_S = 30.0
START_DEADLINE_S = 120.0  # Ray starts processes that import torch; on a busy machine that takes far longer than a call
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What a worker needs to attach: plain values only. An endpoint is (identity, address, ports by name)."""

    controller: tuple[str, str, dict[str, int]]
    storage: tuple[tuple[str, str, dict[str, int]], ...]
    deadline_s: float
    cache_bytes: int


def environment(deadline_s: float = DEADLINE_S) -> dict[str, str]:
    """Environment variables for every process of the run; TransferQueue reads them when it is imported.

    A storage unit is asked up to three times within the deadline; the controller's acknowledgement is
    awaited longer than the deadline, because TransferQueue only logs when it does not come.
    """
    return {
        "TQ_LOGGING_LEVEL": "ERROR",
        "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": str(max(1, round(deadline_s / 3))),
        "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": "1",
        "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "3",
        "TQ_DATA_UPDATE_RESPONSE_TIMEOUT": str(round(2 * deadline_s) + 1),
        "TQ_STORAGE_HANDSHAKE_MAX_RETRIES": "20",
    }


class TransferQueuePlane(RowPlane):
    """One process's client. Made by `create` (one a cluster, ends TransferQueue when closed) or by `attach`."""

    _creator = threading.Lock()  # held while this process has created a TransferQueue

    def __init__(self, settings: Settings, *, owns: bool) -> None:
        """Use `create` or `attach`."""
        super().__init__()
        self.settings = settings
        self._owns = owns
        self._cache = RowCache(settings.cache_bytes)
        self._closed = False
        self._clearing = threading.Lock()
        self._client = within(settings.deadline_s, "attach to TransferQueue", lambda: _connect(settings))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="data-plane")
        self._thread.start()

    @staticmethod
    def create(
        *, deadline_s: float = DEADLINE_S, storage_units: int = 1, trusted_network: bool = False,
        cache_bytes: int = CACHE_BYTES, storage_resource: str | None = None,
    ) -> TransferQueuePlane:  # fmt: skip
        """Start TransferQueue in the Ray cluster that this process is connected to (with CPUs for 1 + storage_units).

        Storage units go round the nodes that have the Ray resource `storage_resource`, or round all nodes.

        Raises DataPlaneError where the cluster has one already, or where it would bind an address that is not loopback
        and the network is not trusted; DataPlaneLost where it does not come up.
        """
        if not TransferQueuePlane._creator.acquire(blocking=False):
            raise _second()
        started = False
        try:
            settings = within(
                START_DEADLINE_S, "start TransferQueue",
                lambda: _start(deadline_s, storage_units, trusted_network, cache_bytes, storage_resource),
            )  # fmt: skip
            started = True
            return TransferQueuePlane(settings, owns=True)
        except BaseException:
            if started:
                within(START_DEADLINE_S, "stop TransferQueue", _stop)
            TransferQueuePlane._creator.release()
            raise

    @staticmethod
    def attach(settings: Settings) -> TransferQueuePlane:
        """A client of a TransferQueue that another process created. Needs no Ray. Raises DataPlaneLost."""
        return TransferQueuePlane(settings, owns=False)

    def _call(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the plane's loop. Raises DataPlaneLost at the deadline or where a unit does not answer."""
        from transfer_queue.storage.managers.simple_storage_manager import StorageUnitTimeout

        if self._closed:
            work.close()
            raise broken(what, "the data plane is closed", "a closed plane reads and writes nothing", "close it last")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self.settings.deadline_s)
        except (TimeoutError, StorageUnitTimeout) as error:
            future.cancel()
            raise _lost(what, self.settings.deadline_s) from error
        except RuntimeError as error:
            raise broken(
                what, f"TransferQueue refused: {error}", "its rows changed meanwhile, or a unit has no memory left",
                "see the cause above",
            ) from error  # fmt: skip

    # rows

    def _write(self, partition: str, rows: tuple[str, ...], blocks: Mapping[str, Block], where: str) -> None:
        what = f"{where}: put {len(rows)} rows from {rows[0]} on"
        self._call(what, self._write_rows(partition, rows, blocks, where))
        self._cache.keep(partition, rows, blocks)

    async def _write_rows(self, partition: str, rows: tuple[str, ...], blocks: Mapping[str, Block], where: str) -> None:
        from tensordict import TensorDict

        found, produced = await asyncio.gather(
            self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=True),
            self._produced(partition, list(blocks)),
        )
        if not produced.isdisjoint(found.global_indexes) and await self._is_repeat(partition, rows, blocks, where):
            return
        fields = TensorDict({name: _encode(block) for name, block in blocks.items()}, batch_size=len(rows))
        await self._client.storage_manager.put_data(fields, found)

    async def _produced(self, partition: str, fields: list[str]) -> set[int]:
        """Indexes of the rows in which any of the fields is there."""
        index, status = await self._client.async_get_production_status(fields, partition)
        if index is None:  # one of the fields is not in the partition yet, which hides the others
            if len(fields) == 1:
                return set()
            return set().union(*await asyncio.gather(*(self._produced(partition, [field]) for field in fields)))
        return set(index[status.any(dim=1)].tolist())

    async def _is_repeat(self, partition: str, rows: Sequence[str], blocks: Mapping[str, Block], where: str) -> bool:
        """Whether everything is there already, with these bytes. Raises DataPlaneError where there are others."""
        held = await asyncio.gather(*(self._schema(partition, [row]) for row in rows))
        for name, block in blocks.items():
            there = [(row, part) for row, part, schema in zip(rows, block.parts(), held) if name in schema]
            if there:
                before = (await self._fetch(partition, [row for row, _ in there], [name], where))[name]
                for (row, part), old in zip(there, before.parts()):
                    if not same_bytes(old, part):
                        raise conflict(where, name, row)
        return all(name in schema for name in blocks for schema in held)

    async def _schema(self, partition: str, rows: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What all of the rows have, field -> shape and dtype; nothing where a row is missing."""
        found = await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False)
        return found.field_schema if found.size == len(rows) else {}

    def _read(
        self, partition: str, wanted: Mapping[tuple[str, ...], Sequence[str]], where: str
    ) -> list[dict[str, Block]]:
        cached = [self._cache.get(partition, rows, fields) for rows, fields in wanted.items()]
        missing = {
            rows: [field for field in fields if field not in have]
            for (rows, fields), have in zip(wanted.items(), cached)
        }
        missing = {rows: fields for rows, fields in missing.items() if fields}
        if not missing:
            return cached
        first = next(iter(missing))
        what = f"{where}: get {', '.join(missing[first])} of {len(first)} rows from {first[0]} on"
        fetched = self._call(what, self._fetch_all(partition, missing, where))
        for rows, blocks in zip(missing, fetched):
            self._cache.keep(partition, rows, blocks)
        return [*cached, *fetched]

    async def _fetch_all(
        self, partition: str, wanted: Mapping[tuple[str, ...], Sequence[str]], where: str
    ) -> list[dict[str, Block]]:
        return await asyncio.gather(*(self._fetch(partition, rows, fields, where) for rows, fields in wanted.items()))

    async def _fetch(self, partition: str, rows: Sequence[str], fields: Sequence[str], where: str) -> dict[str, Block]:
        from transfer_queue import BatchMeta, StorageKeyNotFoundError

        found = await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False)
        gone = found.size != len(rows) or any(name not in found.field_schema for name in fields)
        if not gone:
            # storage_manager and not the client, which sets torch's thread count around each call and adds a round trip
            asked = BatchMeta(found.global_indexes, found.partition_ids, {name: {} for name in fields})
            try:
                columns = await self._client.storage_manager.get_data(asked)
            except StorageKeyNotFoundError:
                gone = True
        if gone:
            held = await asyncio.gather(*(self._schema(partition, [row]) for row in rows))
            at = next(((f, row) for f in fields for row, has in zip(rows, held) if f not in has), (fields[0], rows[0]))
            raise absent(where, *at)
        return {name: _decode(columns.get(name), name, rows, where) for name in fields}

    def _remove(self, partition: str, rows: Sequence[str]) -> None:
        self._cache.forget(rows)
        with self._clearing:  # indexes are reused: two clears of the same rows must not interleave
            self._call(f"clear {len(rows)} rows of {partition!r}", self._remove_rows(partition, rows))

    async def _remove_rows(self, partition: str, rows: Sequence[str]) -> None:
        found = await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False)
        if found.size:
            await self._client.async_clear_samples(found)

    # what the store says

    def presence(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], *, attempt: int = 0
    ) -> dict[str, list[bool]]:
        """What the store says is there; see `DataPlane.presence`. A few round trips a field.

        Only a dense field shows how many samples a row holds: a ragged or str field counts for all keys of its group.
        """
        declared = self._declared(partition, f"presence in {partition!r}")
        rows = list(dict.fromkeys(row_name(key, attempt) for key in keys))
        if not rows:
            return {field: [] for field in fields}
        counts = self._call(f"presence of {', '.join(fields)} in {partition!r}", self._counts(partition, rows, fields))
        present = {}
        for field in fields:
            whole = declared.fields[field].ragged is not None or declared.fields[field].dtype == "str"
            held = [(counts[field].get(row_name(key, attempt)), int(key.partition("_g")[2])) for key in keys]
            present[field] = [count is not None and (whole or index < count) for count, index in held]
        return present

    async def _counts(self, partition: str, rows: list[str], fields: Sequence[str]) -> dict[str, dict[str, int]]:
        """Field -> row that has it -> length of its first dimension (0 for texts)."""
        found = await self._client.async_kv_retrieve_meta(keys=rows, partition_id=partition, create=False)
        if not found.size:
            return {field: {} for field in fields}
        known = await self._client.async_kv_retrieve_keys(found.global_indexes, partition)
        names = dict(zip(found.global_indexes, known))
        counts: dict[str, dict[str, int]] = {}
        for field in fields:
            produced = await self._produced(partition, [field])
            having = [name for index, name in names.items() if index in produced]
            schema = (await self._schema(partition, having)).get(field, {}) if having else {}
            shapes = schema.get("per_sample_shapes") or [schema.get("shape")] * len(having)
            counts[field] = {name: shape[0] if shape else 0 for name, shape in zip(having, shapes)}
        return counts

    def evict(self, rows: Sequence[str]) -> None:
        """Forget rows in this process's cache."""
        self._cache.forget(rows)

    def row_count(self, partition: str) -> int:
        """Rows that TransferQueue holds in the partition."""
        listed = self._call(f"count the rows of {partition!r}", self._client.async_kv_list(partition))
        return len(listed.get(partition, {}))

    def drain(self) -> None:
        """Remove every row of every registered partition."""
        self._cache.forget_all()
        with self._clearing:
            for partition in self._partitions:
                self._call(f"drain {partition!r}", self._client.async_clear_partition(partition))

    def close(self) -> None:
        """Stop the client and, in the process that created it, TransferQueue. Before Ray is shut down. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._cache.forget_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self.settings.deadline_s)
        if not self._thread.is_alive():
            self._loop.close()
        self._client.close()
        if self._owns:
            try:
                within(START_DEADLINE_S, "stop TransferQueue", _stop)
            finally:
                TransferQueuePlane._creator.release()


def within(deadline_s: float, what: str, work: Callable[[], T]) -> T:
    """Run blocking code on a thread of its own, left behind with DataPlaneLost where it takes longer."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, whatever it is
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name=f"data-plane: {what}")
    thread.start()
    thread.join(deadline_s)
    if failed:
        raise failed[0]
    if not done:
        raise _lost(what, deadline_s)
    return done[0]


def _start(
    deadline_s: float, storage_units: int, trusted_network: bool, cache_bytes: int, storage_resource: str | None
) -> Settings:
    for name, value in environment(deadline_s).items():
        os.environ.setdefault(name, value)
    import transfer_queue
    from omegaconf import OmegaConf
    from transfer_queue.utils.zmq_utils import get_node_ip_address

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
    config = transfer_queue.init(asked)
    if config is asked or config.controller.zmq_info is None:  # it attached to one that is there
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
    return Settings(plain[0], tuple(plain[1:]), deadline_s, cache_bytes)


def _stop() -> None:
    import transfer_queue

    transfer_queue.close()


def _connect(settings: Settings) -> Any:
    for name, value in environment(settings.deadline_s).items():
        os.environ.setdefault(name, value)
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
    config = OmegaConf.create({"zmq_info": units}, flags={"allow_objects": True})
    try:
        client.initialize_storage_manager(manager_type="SimpleStorage", config=config)
    except TimeoutError as error:
        raise _lost("attach to TransferQueue", settings.deadline_s) from error
    return client


def _check_address(address: str, trusted_network: bool) -> None:
    if not trusted_network and not ipaddress.ip_address(address).is_loopback:
        raise broken(
            "data plane", f"TransferQueue would listen on {address}",
            "its sockets unpickle what they receive, so whoever reaches them runs code",
            "start Ray on a loopback address, or pass --trusted-network where only trusted machines reach the address",
        )  # fmt: skip


def _second() -> DataPlaneError:
    return broken(
        "data plane", "this Ray cluster runs a TransferQueue already", "one cluster serves one run",
        "end the other run, or start this one without joining its cluster",
    )  # fmt: skip


def _lost(what: str, deadline_s: float) -> DataPlaneLost:
    return DataPlaneLost(
        Problem(
            where=what, what=f"no answer within {deadline_s:g} s",
            why="TransferQueue's controller or a storage unit is gone, or far too slow",
            fix="resume the run from its last checkpoint",
        )
    )  # fmt: skip


def _encode(block: Block) -> Any:
    """One value a row: a dense tensor where all rows have the same number of entries, else a jagged one."""
    import torch
    from tensordict.tensorclass import NonTensorData, NonTensorStack

    if isinstance(block.values, list):
        return NonTensorStack(*(NonTensorData(texts) for texts in block.parts()))
    sizes = block.sizes
    if min(sizes) == max(sizes):
        return block.values.view(len(sizes), sizes[0], *block.values.shape[1:])
    offsets = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(sizes), 0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(block.values, offsets)


def _decode(column: Any, name: str, rows: Sequence[str], where: str) -> Block:
    """The rows' values one after the other, in memory of their own (TransferQueue concatenates them)."""
    import torch

    if not isinstance(column, torch.Tensor):
        texts = [[row] if isinstance(row, str) else row for row in column.tolist()]
        if all(isinstance(row, list) and all(isinstance(text, str) for text in row) for row in texts):
            return Block([text for row in texts for text in row], [len(row) for row in texts])
    elif column.is_nested and column.layout == torch.jagged and len(offsets := _offsets(column)) == len(rows) + 1:
        return Block(column.values(), [b - a for a, b in pairwise(offsets)])
    raise broken(
        where, f"field {name!r} of row {rows[0]} and those after it: their types do not go together",
        "a row holds one tensor [entries, *inner] or a list of texts",
        "write rows as pipeline/data_plane/__init__.py describes",
    )  # fmt: skip


def _offsets(jagged: Any) -> list[int]:
    return jagged.offsets().tolist()
