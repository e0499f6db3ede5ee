"""Batched calls keep every guarantee of single calls, in memory and in TransferQueue."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeline import DataPlaneError, KVBatchMeta
from pipeline.data_plane.memory import MemoryPlane
from pipeline.data_plane.transfer_queue import TransferQueuePlane
from pipeline.declare.columns import take

from .conftest import FIELDS, Store
from .test_plane_contract import NAMES, assert_same, columns_of, keys_of

TWO = torch.zeros(2)


def at_once(plane: Any, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make each call in its own thread and return what each returned or raised.

    With TransferQueue, the first call is held back until the last has arrived, so that the others form one batch."""
    outcomes: list[Any] = [None] * len(calls)

    def do(i: int) -> None:
        try:
            outcomes[i] = calls[i]()
        except DataPlaneError as error:
            outcomes[i] = error

    threads = [threading.Thread(target=do, args=(i,)) for i in range(len(calls))]
    lanes = [] if isinstance(plane, MemoryPlane) else [plane._writes, plane._reads, plane._removals]
    gate, runs = asyncio.Event(), [lane._run for lane in lanes]

    def held_back(run: Any) -> Any:
        async def after_the_gate(batch: list[Any]) -> None:
            await gate.wait()
            await run(batch)

        return after_the_gate

    try:
        for lane, run in zip(lanes, runs):
            lane._run = held_back(run)
        for thread in threads:
            thread.start()
        for _ in range(2000 if lanes else 0):
            if sum(len(lane._waiting) + len(lane._under_way) for lane in lanes) + sum(map(bool, outcomes)) >= len(
                calls
            ):
                break
            time.sleep(0.001)
    finally:
        if lanes:
            plane._loop.call_soon_threadsafe(gate.set)
        for thread in threads:
            thread.join(60)
        for lane, run in zip(lanes, runs):
            lane._run = run
    return outcomes


def test_a_burst_is_what_single_puts_are(store: Store):
    stages = (("response_ids", "logprobs", "halves", "text"), ("reward", "truncated", "count"), ("pixels",))
    alone = MemoryPlane()
    alone.register(store.partition, FIELDS, ["train"])
    puts = []
    for group in (5, 0, 7, 3, 1, 6, 2, 4):
        columns = columns_of([group, 0, 2 * group], seed=group)
        puts += [(keys_of(1, 3, first=group), {name: columns[name] for name in stage}) for stage in stages]
    puts.append((keys_of(2, 3, first=20), columns_of([1, 2, 3, 4, 5, 6])))
    wanted = [alone.put(keys, columns, partition=store.partition, stage="work") for keys, columns in puts]
    got = at_once(store.plane, [lambda put=put: store.put(*put) for put in puts])
    assert got == wanted
    for handle, (_, columns) in zip(got, puts):
        read = store.other.get(handle, handle.fields, reader="train")
        for name in handle.fields:
            assert_same(read[name], columns[name])
    assert store.plane.row_count(store.partition) == 10


def test_a_put_that_fails_its_checks_fails_alone(store: Store):
    columns = {"reward": TWO}
    calls = [lambda g=g: store.put(keys_of(1, 2, first=g), columns) for g in range(5)]
    calls.insert(2, lambda: store.put(keys_of(1, 2, first=9), {"reward": torch.tensor([0.0, float("nan")])}))
    got = at_once(store.plane, calls)
    assert "key 00000009_g001: value nan" in str(got.pop(2))
    assert all(isinstance(handle, KVBatchMeta) for handle in got)
    assert store.plane.row_count(store.partition) == 5


def test_other_bytes_are_told_to_the_one_who_put_them(store: Store):
    for group in (2, 4):
        store.put(keys_of(1, 2, first=group), {"reward": TWO})
    wanted = {group: torch.full((2,), float(group)) for group in range(6)}
    wanted[4] = TWO  # a repeated put
    plane = store.plane
    got = at_once(plane, [
        lambda g=g: plane.put(keys_of(1, 2, first=g), {"reward": wanted[g]}, partition=store.partition, stage=f"s{g}")
        for g in range(6)
    ])  # fmt: skip
    assert "stage 's2'" in str(got[2]) and "row 00000002.0 already has different bytes" in str(got[2])
    wanted[2] = TWO
    for group in (0, 1, 3, 4, 5):
        assert_same(store.other.get(got[group], ["reward"], reader="train")["reward"], wanted[group])
    assert store.other.get(_named(got[0], 2), ["reward"], reader="train")["reward"].tolist() == [0, 0]


def _named(like: KVBatchMeta, group: int) -> KVBatchMeta:
    """Return the handle of an equal put for another group."""
    plane = MemoryPlane()
    plane.register(like.partition_id, FIELDS, ["train"])
    return plane.put(keys_of(1, 2, first=group), {"reward": TWO}, partition=like.partition_id, stage="work")


def test_the_same_rows_twice_in_one_burst(store: Store):
    values = [torch.full((2,), float(i % 2)) for i in range(8)]
    same = at_once(store.plane, [lambda: store.put(keys_of(1, 2), {"reward": values[1]}) for _ in range(8)])
    assert len({handle.keys for handle in same}) == 1
    calls = [lambda v=v: store.put(keys_of(1, 2, first=1), {"reward": v}) for v in values]
    got = at_once(store.plane, calls)
    refused = [outcome for outcome in got if isinstance(outcome, DataPlaneError)]
    assert len(refused) == 4 and all("row 00000001.0 already has" in str(error) for error in refused)
    won = [i for i, outcome in enumerate(got) if isinstance(outcome, KVBatchMeta)]
    assert len({i % 2 for i in won}) == 1
    assert_same(store.other.get(got[won[0]], ["reward"], reader="train")["reward"], values[won[0]])


def test_every_put_of_a_burst_is_written_whole_or_not_at_all(store: Store):
    store.put(keys_of(1, 2, first=3), {"reward": TWO})
    pairs = [(0, 1), (2, 3), (4, 5)]
    got = at_once(store.plane, [
        lambda pair=pair: store.put(
            [*keys_of(1, 2, first=pair[0]), *keys_of(1, 2, first=pair[1])], {"reward": torch.ones(4)}
        )
        for pair in pairs
    ])  # fmt: skip
    assert "row 00000003.0" in str(got[1])
    seen = store.other.presence(store.partition, keys_of(6, 2), ["reward"])["reward"]
    assert seen == [True] * 4 + [False] * 2 + [True] * 6


def test_attempts_of_one_burst_are_fenced(store: Store):
    keys = keys_of(1, 2)
    got = at_once(store.plane, [
        lambda a=a: store.put(keys, {"reward": torch.full((2,), float(a))}, attempt=a) for a in range(4)
    ])  # fmt: skip
    for attempt, handle in enumerate(got):
        assert store.other.get(handle, ["reward"], reader="train")["reward"].tolist() == [attempt] * 2


def test_a_get_that_fails_fails_alone_and_results_are_not_shared(store: Store):
    columns = columns_of([1, 2, 3, 0, 2, 1, 4, 4])
    meta = store.put(keys_of(4, 2), columns)
    ghost = store.plane.adopt(store.partition, keys_of(1, 2, first=8), ["reward"], {})
    parts = [range(0, 4), range(2, 8), range(0, 4), range(6, 8)]
    calls: list[Callable[[], Any]] = [
        lambda p=p: store.other.get(meta.reorder(p), ["reward"], reader="train") for p in parts
    ]
    calls.insert(1, lambda: store.other.get(ghost, ["reward"], reader="prev"))
    calls.append(lambda: store.other.get(meta, NAMES, reader="train"))
    got = at_once(store.other, calls)
    missing = got.pop(1)
    assert "reader 'prev'" in str(missing) and "field 'reward' of row 00000008.0 is not present" in str(missing)
    for name in NAMES:
        assert_same(got[-1][name], columns[name])
    for found, part in zip(got, parts):
        assert_same(found["reward"], take(columns["reward"], part))
        found["reward"].fill_(7)


def test_clears_of_one_burst_take_what_they_name(store: Store):
    meta = store.put(keys_of(8, 2), {"reward": torch.arange(16.0)})
    cuts = [(0, 4), (2, 8), (0, 4), (10, 12)]
    got = at_once(store.plane, [lambda c=c: store.plane.clear(meta.slice(*c)) for c in cuts])
    assert got == [None] * 4
    seen = store.other.presence(store.partition, meta.keys, ["reward"])["reward"]
    assert seen == [False] * 8 + [True] * 2 + [False] * 2 + [True] * 4
    assert store.plane.row_count(store.partition) == 3


def test_concurrent_push_and_take_lose_nothing(store: Store):
    """Six threads put groups while three read and clear what has arrived."""
    groups, failed, seen = 90, [], []
    landed: queue.Queue[tuple[int, KVBatchMeta] | None] = queue.Queue()

    def push(worker: int) -> None:
        for group in range(worker, groups, 6):
            landed.put((group, store.put(keys_of(1, 2, first=group), columns_of([group % 5, 3], seed=group))))

    def pull() -> None:
        while (came := landed.get()) is not None:
            group, handle = came
            got = store.other.get(handle, NAMES, reader="train")
            for name, column in columns_of([group % 5, 3], seed=group).items():
                assert_same(got[name], column)
            store.plane.clear(handle)
            seen.append(group)

    def watched(work: Callable[..., None], *args: int) -> None:
        try:
            work(*args)
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            failed.append(error)

    pushing = [threading.Thread(target=watched, args=(push, worker)) for worker in range(6)]
    pulling = [threading.Thread(target=watched, args=(pull,)) for _ in range(3)]
    for thread in pushing + pulling:
        thread.start()
    for thread in pushing:
        thread.join(60)
    for _ in pulling:
        landed.put(None)
    for thread in pulling:
        thread.join(60)
    assert not failed and sorted(seen) == list(range(groups))
    assert store.plane.row_count(store.partition) == 0


def test_closing_ends_the_calls_that_wait(transfer_queue: TransferQueuePlane):
    plane = TransferQueuePlane.attach(transfer_queue.settings)
    plane.register("closing", FIELDS, ["train"])
    began = threading.Event()

    async def never(batch: list[Any]) -> None:
        began.set()
        await asyncio.Event().wait()

    plane._writes._run = never
    outcomes: list[str] = []

    def put(group: int) -> None:
        try:
            plane.put(keys_of(1, 2, first=group), {"reward": TWO}, partition="closing", stage="work")
        except DataPlaneError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=put, args=(group,)) for group in range(2)]
    for thread in threads:
        thread.start()
    assert began.wait(10)
    for _ in range(2000):
        if plane._writes._waiting:
            break
        time.sleep(0.001)
    plane.close()
    for thread in threads:
        thread.join(10)
    assert len(outcomes) == 2 and all("the data plane is closed" in text for text in outcomes)
