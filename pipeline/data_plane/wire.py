"""The requests of `exchange` to TransferQueue's processes as `actors` extends them. Pinned to version 0.1.11.

Rows travel as plain lists: the client's own calls pack them into nested tensors and unpack them again, which costs more
than the transport. Requests made at the same time share a message (`messages`). Idempotent ones are retried if no reply
comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from pipeline.data_plane.actors import SEVERAL
from pipeline.data_plane.exchange import GoneError
from pipeline.data_plane.messages import SharedMessages
from pipeline.data_plane.packed import packed, unpacked
from pipeline.data_plane.patience import Patience


class TransferQueueWire:
    """`exchange.Wire` over a client of TransferQueue. Counts its messages in `counts`."""

    def __init__(self, client: Any, patience: Patience, counts: Counter[str]) -> None:
        self._counts = counts
        self._client, self._storage, self._patience = client, client.storage_manager, patience
        self._controller = SharedMessages(self._to_controller)
        self._puts: dict[str, SharedMessages] = {}  # by storage unit
        self._gets: dict[str, SharedMessages] = {}

    async def find(self, partition: str, rows: Sequence[str], *, create: bool) -> tuple[list[int], list[str]]:
        indexes, fields = await self._ask("find", partition, list(rows), create)
        return indexes, fields

    async def produced(self, partition: str, fields: Sequence[str]) -> set[int]:
        return set(await self._ask("produced", partition, list(fields)))

    async def schema(self, partition: str, rows: Sequence[str], field: str) -> Mapping[str, Any]:
        """Return TransferQueue's metadata of a field; empty if a row is gone or has no such field."""
        self._counts["requests"] += 1
        look_up = partial(self._client.async_kv_retrieve_meta, keys=list(rows), partition_id=partition)
        found = await self._patience.ask(look_up)
        return found.field_schema.get(field, {}) if len(found.global_indexes) == len(rows) else {}

    async def store(self, partition: str, indexes: list[int], values: Mapping[str, Any]) -> None:
        select = self._storage._select_by_positions
        requests = []
        for unit, (own, positions) in self._storage._group_by_hash(indexes).items():
            every = len(own) == len(indexes)
            columns = {name: rows if every else select(rows, positions) for name, rows in values.items()}
            put = self._puts.setdefault(unit, SharedMessages(partial(self._put, unit)))
            requests.append(put.ask((own, columns)))
        await asyncio.gather(*requests)
        schema = {name: _schema(rows, indexes) for name, rows in values.items()}
        if not await self._ask("announce", partition, indexes, schema):
            raise RuntimeError(f"the controller rejects {', '.join(schema)} as written")

    async def load(self, indexes: list[int], fields: Sequence[str]) -> dict[str, list[Any]]:
        names = list(fields)
        units = self._storage._group_by_hash(indexes)
        asked = []
        for unit, (own, _) in units.items():
            get = self._gets.setdefault(unit, SharedMessages(partial(self._get, unit)))
            asked.append(get.ask((own, names)))
        answers = await asyncio.gather(*asked)
        values: dict[str, list[Any]] = {name: [None] * len(indexes) for name in names}
        for (_, positions), columns in zip(units.values(), answers):
            for name, rows in values.items():
                for position, value in zip(positions, columns[name]):
                    rows[position] = [value] if isinstance(value, str) else value
        return values

    async def erase(self, rows: Mapping[str, Sequence[str]]) -> None:
        from transfer_queue.metadata import BatchMeta

        asked = (self._ask("condemn", partition, list(names)) for partition, names in rows.items())
        indexes_of = dict(zip(rows, await asyncio.gather(*asked)))
        if indexes := list(chain.from_iterable(indexes_of.values())):
            self._counts["requests"] += 1
            homes = [partition for partition, own in indexes_of.items() for _ in own]
            await self._storage.clear_data(BatchMeta(indexes, homes))
            # not retried: its indexes may belong to other rows by then
            await self._message([("release", item) for item in indexes_of.items()])

    async def erase_all(self, partition: str) -> None:
        self._counts["requests"] += 1
        await self._client.async_clear_partition(partition)

    async def _ask(self, operation: str, *given: Any) -> Any:
        """Return the result of one of the controller's operations."""
        return await self._controller.ask((operation, given))

    async def _to_controller(self, requests: Sequence[Any]) -> Any:
        return await self._patience.ask(partial(self._message, requests))

    async def _message(self, requests: Sequence[Any]) -> Any:
        from transfer_queue.utils.zmq_utils import ZMQRequestType

        self._counts["requests"] += 1
        carrier = ZMQRequestType.KV_RETRIEVE_META
        async with self._client.controller_rpc_pool.alease(self._client._controller) as socket:
            answer = await self._client._request_controller(
                socket=socket, request_type=carrier, response_type=carrier, body={SEVERAL: requests}
            )
        return answer.body[SEVERAL]

    async def _put(self, unit: str, requests: Sequence[tuple[list[int], Any]]) -> Sequence[None]:
        indexes, columns = [own for own, _ in requests], {SEVERAL: [packed(columns) for _, columns in requests]}
        put = self._storage._put_to_single_storage_unit
        await self._retried("put", unit, indexes, partial(put, indexes, columns, target_storage_unit=unit))
        return [None for _ in requests]

    async def _get(self, unit: str, requests: Sequence[tuple[list[int], list[str]]]) -> Sequence[Mapping[str, Any]]:
        from transfer_queue import StorageKeyNotFoundError

        indexes, fields = [own for own, _ in requests], {SEVERAL: [names for _, names in requests]}
        get = self._storage._get_from_single_storage_unit
        try:
            _, found = await self._retried(
                "get", unit, indexes, partial(get, indexes, fields, target_storage_unit=unit)
            )
        except StorageKeyNotFoundError as error:
            raise GoneError from error
        return [unpacked(columns) for columns in found]

    async def _retried(self, operation: str, unit: str, indexes: list[list[int]], request: Any) -> Any:
        """Return a unit's answer. Raises TimeoutError if it gives none."""
        from transfer_queue.storage.managers.simple_storage_manager import StorageUnitTimeout

        self._counts["requests"] += 1
        rows = sum(map(len, indexes))
        try:
            return await self._storage._request_with_retry(operation, unit, f"rows={rows}", request)
        except StorageUnitTimeout as error:  # a RuntimeError, but no refusal
            raise TimeoutError from error


def _schema(rows: Any, indexes: Sequence[int]) -> dict[str, Any]:
    """Return the controller's metadata of a field, as TransferQueue's own writers send it."""
    import torch

    tensor = isinstance(rows[0], torch.Tensor)
    message = {"dtype": rows[0].dtype if tensor else None, "shape": rows[0].shape if tensor else None}
    if not tensor or isinstance(rows, torch.Tensor):
        return {**message, "is_nested": False, "is_non_tensor": not tensor}
    shapes = {index: tuple(row.shape) for index, row in zip(indexes, rows)}
    return {**message, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": shapes}
