"""TransferQueue's own processes, as Sluice starts them: they sign and check messages (`signed`) and answer several
requests in one message.

The controller runs `OPERATIONS` in order and answers with their results; a storage unit takes lists where it takes one
request's indexes, columns and fields, and columns travel `packed`. Other messages are answered as TransferQueue does,
for writers outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from pipeline.data_plane.packed import packed, unpacked
from pipeline.data_plane.signed import sign_messages

A_BIT = 0.001  # of a node's own resource, of which each node has 1
SEVERAL = "several requests"  # in the body of a message that carries them; no field has such a name


def _find(controller: Any, partition: str, rows: list[str], create: bool) -> tuple[list[int], list[str]]:
    """Return the indexes of existing rows (all rows with `create`), in order, and the fields that they all have."""
    found = controller.kv_retrieve_meta(rows, partition, create)
    return found.global_indexes, list(found.field_schema)


def _produced(controller: Any, partition: str, fields: list[str]) -> list[int]:
    """Return the indexes of the rows that have any of the fields."""
    having: set[int] = set()
    for field in fields:  # one by one: a field that nothing has yet hides the others
        index, status = controller.get_production_status(partition, [field])
        if index is not None:
            having.update(index[status.any(dim=1)].tolist())
    return list(having)


def _announce(controller: Any, partition: str, indexes: list[int], schema: dict[str, dict[str, Any]]) -> bool:
    """Mark fields of rows as present. Returns False if the controller rejects them."""
    return bool(controller.update_production_status(partition, indexes, schema, None))


def _condemn(controller: Any, partition: str, rows: list[str]) -> list[int]:
    """Return the indexes of existing rows, which have no field any more."""
    indexes, _ = _find(controller, partition, rows, create=False)
    controller.mark_clearing(indexes, [partition] * len(indexes))
    return indexes


def _release(controller: Any, partition: str, indexes: list[int]) -> None:
    """Forget rows. Their indexes may be other rows' from then on."""
    controller.clear_meta(indexes, [partition] * len(indexes))


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "find": _find, "produced": _produced, "announce": _announce, "condemn": _condemn, "release": _release
}  # fmt: skip


@contextmanager
def own_actors(key: bytes, controller_resource: str | None = None) -> Iterator[None]:
    """Inside this context, TransferQueue starts these processes, which sign and check from before they open a socket;
    its controller on a node with this Ray resource, if it is given."""
    from transfer_queue import interface
    from transfer_queue.storage.bootstrap import simple_storage_bootstrap as storage

    places: Sequence[tuple[Any, str, Callable[..., type]]] = (
        (interface, "TransferQueueController", _controller), (storage, "SimpleStorageUnit", _storage_unit)
    )  # fmt: skip
    before = [getattr(module, name) for module, name, _ in places]
    resources = {controller_resource: A_BIT} if controller_resource else {}
    for (module, name, ours), actor, wanted in zip(places, before, (resources, {})):
        made = ours(_signing(actor.__ray_metadata__.modified_class, key))
        made.__name__ = made.__qualname__ = name
        setattr(module, name, interface.ray.remote(num_cpus=1, resources=wanted)(made))
    try:
        yield
    finally:
        for (module, name, _), actor in zip(places, before):
            setattr(module, name, actor)


# The classes are made here, since their bases are known to TransferQueue alone. Ray sends them by value, with the key.


def _signing(actor: Any, key: bytes) -> type:
    sign: Callable[[bytes], None] = sign_messages

    class Signing(actor):
        def __init__(self, *given: Any, **named: Any) -> None:
            sign(key)
            super().__init__(*given, **named)

    return Signing


def _controller(base: Any) -> type:
    operations, several = OPERATIONS, SEVERAL

    class Controller(base):
        def _handle_request(self, message: Any, monitor: Any) -> Any:
            if several not in message.body:
                return super()._handle_request(message, monitor)
            answers = [operations[name](self, *given) for name, given in message.body[several]]
            return replace(message, body={several: answers})

    return Controller


def _storage_unit(base: Any) -> type:
    several, each, cached, rows_of = SEVERAL, _each, cache, unpacked

    class StorageUnit(base):
        def __init__(self, *given: Any, **named: Any) -> None:
            from transfer_queue.utils import common

            # each request asks for it, and it reads a file of each core
            common.psutil.cpu_count = cached(common.psutil.cpu_count)
            super().__init__(*given, **named)

        def _handle_put(self, message: Any) -> Any:
            handle, columns = super()._handle_put, message.body["data"]
            if several not in columns:
                return handle(message)
            return each(handle, message, "data", zip(message.body["global_indexes"], map(rows_of, columns[several])))

        def _handle_get(self, message: Any) -> Any:
            handle, fields = super()._handle_get, message.body["fields"]
            if several not in fields:
                return handle(message)
            return each(handle, message, "fields", zip(message.body["global_indexes"], fields[several]))

    return StorageUnit


def _each(handle: Callable[[Any], Any], message: Any, what: str, requests: Iterable[tuple[list[int], Any]]) -> Any:
    """Return the answer to all requests of a message: the first refusal, or the columns of each, packed."""
    values = []
    for indexes, wanted in requests:
        answer = handle(replace(message, body={"global_indexes": indexes, what: wanted}))
        if "message" in answer.body:
            return answer
        values.append(packed(answer.body.get("data") or {}))
    return replace(answer, body={"data": values})
