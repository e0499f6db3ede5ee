"""Batches writes, reads and removals over a store of rows, and routes errors to the right caller.

The calls of one batch (`Batcher`) share requests: one lookup for all their rows, one request for calls on the same
fields. Callers cannot notice: a repeat is a no-op, conflicting bytes and missing rows raise for their own caller only,
and a request that the store rejects is repeated call by call. Knows blocks and rows; the store is a `Wire`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.data_plane.base import absent, conflict
from pipeline.data_plane.batcher import PlaneCall, contained
from pipeline.data_plane.packed import JOINED_BYTES
from pipeline.data_plane.rows import Block, Value, same_bytes

if TYPE_CHECKING:
    import torch


class Write(PlaneCall):
    """Blocks for rows. Resolves to None once they are stored."""

    def __init__(self, partition: str, rows: Sequence[str], blocks: Mapping[str, Block], where: str) -> None:
        super().__init__()
        self.partition, self.rows, self.blocks, self.where = partition, rows, blocks, where


class Read(PlaneCall):
    """Fields of rows. Resolves to one list of values per field, in row order."""

    def __init__(self, partition: str, rows: Sequence[str], fields: Sequence[str], where: str) -> None:
        super().__init__()
        self.partition, self.rows, self.fields, self.where = partition, rows, fields, where


class Remove(PlaneCall):
    """Rows to remove; None means the whole partition. Resolves to None once they are gone."""

    def __init__(self, partition: str, rows: Sequence[str] | None) -> None:
        super().__init__()
        self.partition, self.rows = partition, rows


class GoneError(LookupError):
    """A row was cleared between lookup and read."""


class Wire(Protocol):
    """The requests of a store. Each takes one round trip; `store` and `erase` take several."""

    async def find(self, partition: str, rows: Sequence[str], *, create: bool) -> tuple[list[int], Collection[str]]:
        """Return the indexes of existing rows (all rows with `create`), in order, and the fields that they all have."""

    async def produced(self, partition: str, fields: Sequence[str]) -> set[int]:
        """Return the indexes of the rows that have any of the fields."""

    async def store(self, partition: str, indexes: list[int], values: Mapping[str, torch.Tensor | list[Value]]) -> None:
        """Write one value per row and make it present. A tensor holds consecutive rows of one shape.

        Raises RuntimeError if the store rejects it.
        """

    async def load(self, indexes: list[int], fields: Sequence[str]) -> Mapping[str, list[Any]]:
        """Return one value per row. Raises GoneError if a row was cleared."""

    async def erase(self, rows: Mapping[str, Sequence[str]]) -> None:
        """Remove rows of each partition; missing rows are ignored."""

    async def erase_all(self, partition: str) -> None:
        """Remove every row of a partition."""


class Exchange:
    """Runs batches over a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    # writes

    async def write(self, calls: Sequence[Write]) -> None:
        """Store the blocks of every call, as if the calls ran one after another."""
        for wave in waves(calls):
            partitions: dict[str, list[Write]] = {}
            for call in wave:
                partitions.setdefault(call.partition, []).append(call)
            await asyncio.gather(
                *(contained(members, self._write_into, name, members) for name, members in partitions.items())
            )

    async def _write_into(self, partition: str, calls: list[Write]) -> None:
        rows = list(dict.fromkeys(row for call in calls for row in call.rows))
        kinds: dict[tuple[str, ...], list[Write]] = {}
        for call in calls:
            kinds.setdefault(tuple(call.blocks), []).append(call)
        look_up = self._wire.find(partition, rows, create=True)
        if len(rows) == 1:  # then the fields of all rows are the fields of this one
            indexes, held = await look_up
            produced = [set(indexes) if any(name in held for name in fields) else set() for fields in kinds]
        else:
            asked = asyncio.gather(*(self._wire.produced(partition, fields) for fields in kinds))
            (indexes, _), produced = await asyncio.gather(look_up, asked)
        index_of = dict(zip(rows, indexes))
        await asyncio.gather(
            *(
                contained(members, self._write_alike, partition, members, index_of, there)
                for members, there in zip(kinds.values(), produced)
            )
        )

    async def _write_alike(
        self, partition: str, calls: list[Write], index_of: Mapping[str, int], there: set[int]
    ) -> None:
        """Write calls on the same fields; rows with an index in `there` already have some of the fields."""
        new = []
        for call in calls:
            if there.isdisjoint(index_of[row] for row in call.rows):
                new.append(call)
            else:
                await contained([call], self._repeat, call, index_of)
        if len(new) > 1:
            try:
                await self._store(partition, new, index_of)
            except RuntimeError:  # one of them is invalid: repeat each alone; the same bytes may be sent twice
                pass
            else:
                return
        for call in new:
            await contained([call], self._store, partition, [call], index_of)

    async def _repeat(self, call: Write, index_of: Mapping[str, int]) -> None:
        """Repeat a write to rows that have some of its fields. Raises DataPlaneError if their bytes differ."""
        held = await asyncio.gather(*(self._fields(call.partition, row) for row in call.rows))
        for name, block in call.blocks.items():
            there = [(row, part) for row, part, fields in zip(call.rows, block.parts(), held) if name in fields]
            if there:
                before = (await self._fetch(call.partition, [row for row, _ in there], [name], call.where))[name]
                for (row, part), old in zip(there, before):
                    if not same_bytes(old, part):
                        raise conflict(call.where, name, row)
        if all(name in fields for name in call.blocks for fields in held):
            call.answer()
        else:
            await self._store(call.partition, [call], index_of)

    async def _store(self, partition: str, calls: list[Write], index_of: Mapping[str, int]) -> None:
        indexes = [index_of[row] for call in calls for row in call.rows]
        values = {name: together([call.blocks[name] for call in calls]) for name in calls[0].blocks}
        await self._wire.store(partition, indexes, values)
        for call in calls:
            call.answer()

    async def _fields(self, partition: str, row: str) -> Collection[str]:
        return (await self._wire.find(partition, [row], create=False))[1]

    # reads

    async def read(self, calls: Sequence[Read]) -> None:
        """Fetch the rows of every call."""
        alike: dict[tuple[str, ...], list[Read]] = {}
        for call in calls:
            alike.setdefault((call.partition, *call.fields), []).append(call)
        await asyncio.gather(*(contained(members, self._read_alike, members) for members in alike.values()))

    async def _read_alike(self, calls: list[Read]) -> None:
        first = calls[0]
        if len(calls) > 1:
            rows = list(dict.fromkeys(row for call in calls for row in call.rows))
            if (found := await self._look(first.partition, rows, first.fields)) is not None:
                at = {row: i for i, row in enumerate(rows)}
                for call in calls:
                    call.answer({name: [values[at[row]] for row in call.rows] for name, values in found.items()})
                return
        await asyncio.gather(*(contained([call], self._read_alone, call) for call in calls))

    async def _read_alone(self, call: Read) -> None:
        call.answer(await self._fetch(call.partition, call.rows, call.fields, call.where))

    async def _fetch(
        self, partition: str, rows: Sequence[str], fields: Sequence[str], where: str
    ) -> Mapping[str, list[Any]]:
        if (found := await self._look(partition, rows, fields)) is not None:
            return found
        held = await asyncio.gather(*(self._fields(partition, row) for row in rows))
        at = next(((f, row) for f in fields for row, has in zip(rows, held) if f not in has), (fields[0], rows[0]))
        raise absent(where, *at)

    async def _look(self, partition: str, rows: Sequence[str], fields: Sequence[str]) -> Mapping[str, list[Any]] | None:
        """Return the values, or None if one is missing."""
        indexes, held = await self._wire.find(partition, rows, create=False)
        if len(indexes) != len(rows) or any(name not in held for name in fields):
            return None
        try:
            return await self._wire.load(indexes, fields)
        except GoneError:
            return None

    # removals

    async def remove(self, calls: Sequence[Remove]) -> None:
        """Remove the rows of every call, those of all partitions together."""
        some = [call for call in calls if call.rows is not None]
        whole = [call for call in calls if call.rows is None]
        await asyncio.gather(contained(some, self._erase, some), contained(whole, self._erase_all, whole))

    async def _erase(self, calls: Sequence[Remove]) -> None:
        rows: dict[str, dict[str, None]] = {}
        for call in calls:
            rows.setdefault(call.partition, {}).update(dict.fromkeys(call.rows or ()))
        if rows:
            await self._wire.erase({partition: list(names) for partition, names in rows.items()})
        for call in calls:
            call.answer()

    async def _erase_all(self, calls: Sequence[Remove]) -> None:
        await asyncio.gather(*(self._wire.erase_all(name) for name in dict.fromkeys(call.partition for call in calls)))
        for call in calls:
            call.answer()


def waves(calls: Sequence[Write]) -> list[list[Write]]:
    """Split calls in order into waves without conflicting writes to a field of a row, so the second write sees the
    first."""
    cut: list[list[Write]] = []
    last: dict[
        tuple[str, str], dict[str, int]
    ] = {}  # (partition, row) -> field -> wave of the last call that writes it
    for call in calls:
        held = [last.setdefault((call.partition, row), {}) for row in call.rows]
        wave = 1 + max((fields.get(name, -1) for fields in held for name in call.blocks), default=-1)
        for fields in held:
            fields.update(dict.fromkeys(call.blocks, wave))
        if wave == len(cut):
            cut.append([])
        cut[wave].append(call)
    return cut


def together(blocks: Sequence[Block]) -> torch.Tensor | list[Value]:
    """Join the rows of several blocks of one field, for `Wire.store`: rows of equal size to one tensor. Copies only
    small rows."""
    import torch

    first = blocks[0].values
    if isinstance(first, torch.Tensor):
        sizes = {size for block in blocks for size in block.sizes}
        rows, size = sum(len(block.sizes) for block in blocks), next(iter(sizes))
        row_bytes = size * first[:1].numel() * first.element_size()
        if len(sizes) == 1 and (len(blocks) == 1 or row_bytes <= JOINED_BYTES):
            values = first if len(blocks) == 1 else torch.cat([block.values for block in blocks])  # type: ignore[misc]
            return values.view(rows, size, *first.shape[1:])
    return [part for block in blocks for part in block.parts()]
