"""How calls are batched into requests and how errors reach callers, with a store that counts, refuses and hangs."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import DataPlaneError
from pipeline.data_plane.batcher import Batcher, PlaneCall
from pipeline.data_plane.exchange import JOINED_BYTES, Exchange, GoneError, Read, Remove, Write, together, waves
from pipeline.data_plane.rows import Block

BAD = 666.0


class CountingWire:
    """A store in a dict. `asked` counts requests, values of BAD are refused, and `hang` blocks all requests."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.stored: list[list[int]] = []
        self.hang: asyncio.Event | None = None
        self.lost_partition = ""
        self.vanishing: set[int] = set()  # indexes that are cleared between lookup and load
        self._names: dict[tuple[str, str], int] = {}
        self._values: dict[int, dict[str, Any]] = {}

    async def _request(self, kind: str) -> None:
        self.asked[kind] += 1
        if self.hang is not None:
            await self.hang.wait()
        await asyncio.sleep(0)

    async def find(self, partition: str, rows: Sequence[str], *, create: bool) -> tuple[list[int], Mapping[str, Any]]:
        await self._request("find")
        if partition == self.lost_partition:
            raise RuntimeError("no such partition")
        names = [(partition, row) for row in rows]
        for name in names if create else ():
            self._values.setdefault(self._names.setdefault(name, len(self._names)), {})
        indexes = [self._names[name] for name in names if name in self._names]
        held = [self._values[index].keys() for index in indexes]
        return indexes, dict.fromkeys(set.intersection(*map(set, held)) if held else ())

    async def produced(self, partition: str, fields: Sequence[str]) -> set[int]:
        await self._request("produced")
        return {index for index, values in self._values.items() if values.keys() & set(fields)}

    async def store(self, partition: str, indexes: list[int], values: Mapping[str, Any]) -> None:
        await self._request("store")
        self.stored.append(indexes)
        rows = {name: list(of) for name, of in values.items()}
        if any(isinstance(v, torch.Tensor) and (v == BAD).any() for of in rows.values() for v in of):
            raise RuntimeError("out of memory")
        for name, of in rows.items():
            for index, value in zip(indexes, of, strict=True):
                self._values[index][name] = value

    async def load(self, indexes: list[int], fields: Sequence[str]) -> dict[str, list[Any]]:
        await self._request("load")
        if any(index in self.vanishing for index in indexes):
            for index in self.vanishing:
                self._values[index] = {}
            raise GoneError
        return {name: [self._values[index][name] for index in indexes] for name in fields}

    async def erase(self, rows: Mapping[str, Sequence[str]]) -> None:
        await self._request("erase")
        for place, index in self._names.items():
            if place[1] in rows.get(place[0], ()):
                self._values[index] = {}

    async def erase_all(self, partition: str) -> None:
        await self._request("erase_all")
        for place, index in self._names.items():
            if place[0] == partition:
                self._values[index] = {}


class Store:
    """The three lanes of an exchange over a counting wire."""

    def __init__(self, deadline_s: float = 20) -> None:
        self.loop, self.wire = asyncio.new_event_loop(), CountingWire()
        exchange = Exchange(self.wire)
        self.writes: Batcher[Write] = Batcher(self.loop, exchange.write, deadline_s)
        self.reads: Batcher[Read] = Batcher(self.loop, exchange.read, deadline_s)
        self.removals: Batcher[Remove] = Batcher(self.loop, exchange.remove, deadline_s)
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def on_loop(self, work: Any) -> Any:
        """Run a function on the loop and wait for it."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def hold(self) -> None:
        """Block requests from now on."""
        self.on_loop(lambda: setattr(self.wire, "hang", asyncio.Event()))

    def release(self) -> None:
        """Unblock requests."""

        def go() -> None:
            assert self.wire.hang is not None
            self.wire.hang.set()
            self.wire.hang = None

        self.on_loop(go)

    def together(self, batcher: Batcher, calls: Sequence[PlaneCall], first: PlaneCall) -> None:
        """Submit `first` to an idle batcher, submit `calls` while it is in flight, and wait for all."""
        self.rested(batcher)
        self.hold()
        batcher.submit(first)
        self.on_loop(lambda: None)
        for call in calls:
            batcher.submit(call)
        self.release()
        for call in (first, *calls):
            call.done.exception(10)

    def rested(self, batcher: Batcher) -> None:
        """Wait until nothing is in flight."""
        if batcher._work_done is not None:
            batcher._work_done.result(10)

    def close(self) -> None:
        self.on_loop(lambda: [task.cancel() for task in asyncio.all_tasks() - {asyncio.current_task()}])
        self.on_loop(lambda: None)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.close()


def write(row: str, value: float = 1.0, partition: str = "p", **fields: float) -> Write:
    values = {"reward": value, **fields}
    blocks = {name: Block(torch.full((2,), float(v)), [2]) for name, v in values.items()}
    return Write(partition, (row,), blocks, f"put {row}")


def value_of(store: Store, row: str) -> list[float]:
    call = Read("p", (row,), ("reward",), "look")
    store.reads.submit(call)
    return call.done.result(10)["reward"][0].tolist()


def test_a_burst_takes_the_requests_of_two_calls(store: Store):
    calls = [write(f"r{i}", i) for i in range(31)]
    store.together(store.writes, calls, write("first", 7))
    assert store.wire.asked == {"find": 2, "store": 2, "produced": 1}  # a single row needs no second lookup
    assert [len(indexes) for indexes in store.wire.stored] == [1, 31]
    assert [value_of(store, f"r{i}") for i in range(31)] == [[i, i] for i in range(31)]
    store.wire.asked.clear()
    reads = [Read("p", (f"r{i}", f"r{i + 1}"), ("reward",), "get") for i in range(30)]
    store.together(store.reads, reads, Read("p", ("first",), ("reward",), "get"))
    assert store.wire.asked == {"find": 2, "load": 2}
    assert [[v.tolist()[0] for v in call.done.result()["reward"]] for call in reads] == [[i, i + 1] for i in range(30)]
    store.wire.asked.clear()
    removals = [Remove("pq"[i % 2], (f"r{i}",)) for i in range(31)]
    store.together(store.removals, removals, Remove("p", ("first",)))
    assert store.wire.asked == {"erase": 2}  # those of all partitions go together


def test_writes_of_other_fields_do_not_slow_each_other_down(store: Store):
    rollout = [write(f"r{i}") for i in range(4)]
    store.together(store.writes, rollout[1:], rollout[0])
    store.wire.asked.clear()
    scores = [Write("p", (f"r{i}",), {"score": Block(torch.ones(2), [2])}, "score") for i in range(4)]
    store.together(store.writes, [*scores, *(write(f"s{i}") for i in range(4))], write("t"))
    # rows of `scores` exist with another field: not a repeat, and not checked row by row
    assert store.wire.asked == {"find": 2, "produced": 2, "store": 3}


def test_what_the_store_refuses_is_told_to_its_own_caller(store: Store):
    calls = [write(f"r{i}", BAD if i == 2 else i) for i in range(5)]
    store.together(store.writes, calls, write("first"))
    assert str(calls[2].done.exception()) == "out of memory"
    assert [value_of(store, f"r{i}") for i in (0, 1, 3, 4)] == [[i, i] for i in (0, 1, 3, 4)]


def test_another_partition_is_not_concerned(store: Store):
    store.wire.lost_partition = "q"
    calls = [write("a"), write("a", partition="q"), write("b", partition="q"), write("b")]
    store.together(store.writes, calls, write("first"))
    assert [str(call.done.exception()) for call in calls] == ["None", "no such partition", "no such partition", "None"]


def test_a_repeat_in_one_burst_is_seen(store: Store):
    calls = [write("a", 1), write("a", 1), write("a", 2), write("a", 1, other=3), write("b", 4)]
    store.together(store.writes, calls, write("first"))
    errors = [call.done.exception() for call in calls]
    assert [type(error) for error in errors] == [type(None), type(None), DataPlaneError, type(None), type(None)]
    assert value_of(store, "a") == [1, 1]
    assert len(store.wire.stored) == 3  # the first one, "a" and "b", and "a" again for its new field


def test_a_row_that_is_cleared_meanwhile_is_missed_by_its_own_reader(store: Store):
    store.together(store.writes, [write("b", 2)], write("a", 1))
    store.wire.vanishing = {0}
    reads = [Read("p", (row,), ("reward",), f"get {row}") for row in ("a", "b")]
    store.together(store.reads, reads, Read("p", ("b",), ("reward",), "get"))
    assert "get a: field 'reward' of row a is not present" in str(reads[0].done.exception())
    assert reads[1].done.result()["reward"][0].tolist() == [2, 2]


def test_a_store_that_hangs_costs_each_batch_its_deadline_and_no_more():
    store = Store(deadline_s=0.2)
    try:
        store.hold()
        stuck, behind = write("a"), write("b")
        store.writes.submit(stuck)
        store.on_loop(lambda: None)
        store.writes.submit(behind)
        for call in (stuck, behind):
            assert isinstance(call.done.exception(10), TimeoutError)
        store.release()
        last = write("d", 5)
        store.writes.submit(last)
        assert last.done.exception(10) is None and value_of(store, "d") == [5, 5]
    finally:
        store.close()


def test_failing_a_lane_ends_all_who_wait(store: Store):
    store.hold()
    calls = [write("a"), write("b")]
    for call in calls:
        store.writes.submit(call)
        store.on_loop(lambda: None)
    store.writes.fail(ValueError("over"))
    store.writes.submit(late := write("c"))
    assert [str(call.done.exception(10)) for call in (*calls, late)] == ["over"] * 3
    store.release()


def test_what_its_caller_has_given_up_is_not_sent(store: Store):
    store.hold()
    store.writes.submit(write("first"))
    store.on_loop(lambda: None)
    given_up = [write(f"x{i}") for i in range(3)]
    for call in given_up:
        store.writes.submit(call)
        assert call.done.cancel()
    store.release()
    for i in range(20):  # the batcher is idle and starts again
        call = write(f"r{i}", i)
        store.writes.submit(call)
        call.done.result(10)
    assert value_of(store, "r19") == [19, 19]
    assert sum(map(len, store.wire.stored)) == 21


def test_callers_that_come_again_share_the_next_batch(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.data_plane.batcher.LINGER_S", 0.3)
    store.together(store.writes, [write("a"), write("b")], write("first"))
    again = [write("c"), write("d")]
    for call in again:
        store.writes.submit(call)
        store.on_loop(lambda: None)
    for call in again:
        call.done.result(10)
    assert [len(indexes) for indexes in store.wire.stored] == [1, 2, 2]


few = st.lists(st.sampled_from("abc"), min_size=1, unique=True)


@given(st.lists(st.tuples(few, few), max_size=12))
def test_waves_keep_the_order_of_writes_to_a_place_and_share_none(places):
    calls = [Write("p", rows, {f: Block(torch.zeros(1), [1]) for f in fields}, "") for rows, fields in places]
    cut = waves(calls)
    assert sorted(map(id, calls)) == sorted(id(call) for wave in cut for call in wave)
    number = {id(call): i for i, wave in enumerate(cut) for call in wave}
    for i, second in enumerate(calls):
        before = [c for c in calls[:i] if set(c.rows) & set(second.rows) and c.blocks.keys() & second.blocks.keys()]
        assert number[id(second)] == 1 + max((number[id(call)] for call in before), default=-1)


@pytest.mark.parametrize("inner", [(), (JOINED_BYTES,)])
@given(sizes=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4), data=st.data())
def test_rows_of_several_blocks_travel_as_they_are(inner, sizes, data):
    if data.draw(st.booleans()):
        sizes = [[2] * len(of) for of in sizes]
    blocks = [Block(torch.randn(sum(of), *inner), of) for of in sizes]
    wanted = [part for block in blocks for part in block.parts()]
    joined = together(blocks)
    assert len(joined) == len(wanted)
    assert all(torch.equal(row, part) for row, part in zip(joined, wanted))
    if inner and any(map(sum, sizes)):  # large rows are not copied
        own = {block.values.untyped_storage().data_ptr() for block in blocks}
        assert {row.untyped_storage().data_ptr() for row in joined if len(row)} <= own


def test_texts_travel_as_lists():
    blocks = [Block(["a", "b", "c"], [2, 1]), Block(["d"], [1])]
    assert together(blocks) == [["a", "b"], ["c"], ["d"]]
