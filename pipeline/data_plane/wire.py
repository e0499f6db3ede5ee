"""The requests of `exchange` in TransferQueue's protocol. Pinned to version 0.1.11.

Rows travel as plain lists: the client's own calls pack them into nested tensors and unpack them again, which costs more
than the transport. Idempotent requests are retried if no reply comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from pipeline.data_plane.exchange import GoneError
from pipeline.data_plane.patience import Patience


class TransferQueueWire:
    """`exchange.Wire` over a client of TransferQueue. Counts its requests in `counts`."""

    def __init__(self, client: Any, patience: Patience, counts: Counter[str]) -> None:
        self._counts = counts
        self._client, self._storage, self._patience = client, client.storage_manager, patience

    async def find(self, partition: str, rows: Sequence[str], *, create: bool) -> tuple[list[int], dict[str, Any]]:
        found = await self._meta(partition, rows, create=create)
        return found.global_indexes, found.field_schema

    async def _meta(self, partition: str, rows: Sequence[str], *, create: bool) -> Any:
        self._counts["requests"] += 1
        look_up = self._client.async_kv_retrieve_meta
        return await self._patience.ask(partial(look_up, keys=list(rows), partition_id=partition, create=create))

    async def produced(self, partition: str, fields: Sequence[str]) -> set[int]:
        self._counts["requests"] += 1
        status_of = self._client.async_get_production_status
        index, status = await self._patience.ask(partial(status_of, list(fields), partition))
        if index is None:  # a field that is missing in the partition hides the others: ask for each by itself
            if len(fields) == 1:
                return set()
            return set().union(*await asyncio.gather(*(self.produced(partition, [field]) for field in fields)))
        return set(index[status.any(dim=1)].tolist())

    async def store(self, partition: str, indexes: list[int], values: Mapping[str, Any]) -> None:
        put, select = self._storage._put_to_single_storage_unit, self._storage._select_by_positions
        requests = []
        for unit, (own, positions) in self._storage._group_by_hash(indexes).items():
            every = len(own) == len(indexes)
            columns = {name: rows if every else select(rows, positions) for name, rows in values.items()}
            requests.append(self._retried("put", unit, own, partial(put, own, columns, target_storage_unit=unit)))
        await asyncio.gather(*requests)
        schema = {name: _schema(rows, indexes) for name, rows in values.items()}
        await self._patience.ask(partial(self._announce, partition, indexes, schema))

    async def _announce(self, partition: str, indexes: list[int], schema: dict[str, dict[str, Any]]) -> None:
        """Mark the rows' fields as present. Like the client's own call, but on this loop instead of a thread, and a
        rejection is an error."""
        from transfer_queue.utils.zmq_utils import ZMQRequestType

        body = {
            "partition_id": partition, "global_indexes": indexes, "field_schema": schema, "custom_backend_meta": None
        }  # fmt: skip
        self._counts["requests"] += 1
        async with self._client.controller_rpc_pool.alease(self._client._controller) as socket:
            answer = await self._client._request_controller(
                socket=socket, body=body, request_type=ZMQRequestType.NOTIFY_DATA_UPDATE,
                response_type=ZMQRequestType.NOTIFY_DATA_UPDATE_ACK,
            )  # fmt: skip
        if not answer.body["success"]:
            raise RuntimeError(f"the controller rejects {', '.join(schema)} as written")

    async def load(self, indexes: list[int], fields: Sequence[str]) -> dict[str, list[Any]]:
        from transfer_queue import StorageKeyNotFoundError

        get, names = self._storage._get_from_single_storage_unit, list(fields)
        units = self._storage._group_by_hash(indexes)
        try:
            answers = await asyncio.gather(
                *(
                    self._retried("get", unit, own, partial(get, own, names, target_storage_unit=unit))
                    for unit, (own, _) in units.items()
                )
            )
        except StorageKeyNotFoundError as error:
            raise GoneError from error
        values: dict[str, list[Any]] = {name: [None] * len(indexes) for name in names}
        for (_, positions), (_, columns) in zip(units.values(), answers):
            for name, rows in values.items():
                for position, value in zip(positions, columns[name]):
                    rows[position] = [value] if isinstance(value, str) else value
        return values

    async def erase(self, rows: Mapping[str, Sequence[str]]) -> None:
        from transfer_queue.metadata import BatchMeta

        asked = (self._meta(partition, names, create=False) for partition, names in rows.items())
        indexes_of = dict(zip(rows, [meta.global_indexes for meta in await asyncio.gather(*asked)]))
        indexes = list(chain.from_iterable(indexes_of.values()))
        if indexes:
            self._counts["requests"] += 1
            homes = [partition for partition, own in indexes_of.items() for _ in own]
            # not retried: its indexes may belong to other rows by then
            await self._client.async_clear_samples(BatchMeta(indexes, homes))

    async def erase_all(self, partition: str) -> None:
        self._counts["requests"] += 1
        await self._client.async_clear_partition(partition)

    def _retried(self, operation: str, unit: str, indexes: list[int], request: Callable[[], Any]) -> Any:
        self._counts["requests"] += 1
        return self._storage._request_with_retry(operation, unit, f"rows={len(indexes)}", request)


def _schema(rows: Any, indexes: Sequence[int]) -> dict[str, Any]:
    """Return the controller's metadata of a field, as TransferQueue's own writers send it."""
    import torch

    tensor = isinstance(rows[0], torch.Tensor)
    message = {"dtype": rows[0].dtype if tensor else None, "shape": rows[0].shape if tensor else None}
    if not tensor or isinstance(rows, torch.Tensor):
        return {**message, "is_nested": False, "is_non_tensor": not tensor}
    shapes = {index: tuple(row.shape) for index, row in zip(indexes, rows)}
    return {**message, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": shapes}
