"""What only a multi-process store has: outside writers, one creator, loopback, caches, a lost controller."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
import zmq.asyncio

from pipeline import DataPlaneError, KVBatchMeta
from pipeline.data_plane.memory import MemoryPlane
from pipeline.data_plane.signed import sign_messages
from pipeline.data_plane.transfer_queue import Settings, TransferQueuePlane, _check_address, environment
from pipeline.declare.columns import Ragged
from pipeline.declare.handle import sample_key
from pipeline.errors import DataPlaneLost
from tests.forked import FORKS

from .conftest import FIELDS, Store
from .test_plane_contract import NAMES, assert_same, columns_of, keys_of

REPOSITORY = Path(__file__).resolve().parents[2]


def write_outside(ray: Any, store: Store, row: str, values: dict[str, Any]) -> None:
    """Write a row from another process with the key of the run and plain calls; in memory, write to the store without
    any check."""
    if isinstance(store.plane, MemoryPlane):
        return store.plane.write_outside(store.partition, row, values)

    @ray.remote(num_cpus=0)
    def write(key: bytes, partition: str, row: str, values: dict[str, Any]) -> None:
        import transfer_queue
        from tensordict import TensorDict
        from tensordict.tensorclass import NonTensorStack

        sign_messages(key)
        transfer_queue.init()
        one = {n: v[None] if hasattr(v, "dtype") else NonTensorStack(v) for n, v in values.items()}
        transfer_queue.kv_batch_put(keys=[row], partition_id=partition, fields=TensorDict(one, batch_size=1))

    ray.get(write.remote(store.plane.settings.key, store.partition, row, values), timeout=240)


@pytest.fixture
def ray(store: Store, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("ray_session") if store.kind == "transfer_queue" else None


def test_what_another_process_wrote_is_seen_and_adopted(store: Store, ray: Any):
    keys = keys_of(2, 3)
    lengths = (2, 0, 1, 1, 1, 3)
    mine = store.put(keys, {"response_ids": Ragged(torch.arange(8), lengths)})
    fields = ["reward", "logprobs", "text"]
    assert not any(map(any, store.plane.presence(store.partition, keys, fields).values()))
    for group, (start, stop, tokens) in enumerate(((0, 3, 3), (3, 6, 5))):
        values = {
            "reward": torch.arange(start, stop).float(), "text": [f"t{i}" for i in range(start, stop)],
            "logprobs": -1 - torch.arange(tokens).float() - group,
        }  # fmt: skip
        write_outside(ray, store, f"{group:08d}.0", values)
        seen = store.plane.presence(store.partition, keys, fields)
        assert seen == dict.fromkeys(fields, [True] * stop + [False] * (6 - stop))
    adopted = store.plane.adopt(store.partition, keys, fields, mine.lengths)
    both = KVBatchMeta.join([mine, adopted]).reorder([4, 2, 0])
    got = store.other.get(both, [*fields, "response_ids"], reader="train")
    assert got["reward"].tolist() == [4, 2, 0] and got["text"] == ["t4", "t2", "t0"]
    assert_same(got["logprobs"], Ragged(torch.tensor([-3.0, -3, -1, -2]), (1, 1, 2)))
    assert_same(got["response_ids"], Ragged(torch.tensor([4, 2, 0, 1]), (1, 1, 2)))


def test_what_another_process_wrote_wrongly_is_named(store: Store, ray: Any):
    keys = keys_of(1, 2)
    write_outside(ray, store, "00000000.0", {
        "reward": torch.zeros(2, dtype=torch.float64), "logprobs": torch.zeros(2), "text": torch.zeros(2),
        "count": torch.zeros(2, 3, 2, dtype=torch.int32),
    })  # fmt: skip
    refused = {
        "reward": r"the store holds float64 \[\]; it is declared float32", "count": r"the store holds int32 \[3, 2\]",
        "logprobs": r"row 00000000.0 has 2 entries; the key needs entries 2 to 5", "text": "the store holds float32",
    }  # fmt: skip
    meta = store.plane.adopt(store.partition, keys, list(refused), {"T": (2, 3)})
    for field, text in refused.items():
        with pytest.raises(DataPlaneError, match=f"field '{field}', key 00000000_g00[01]: {text}"):
            store.other.get(meta, [field], reader="train")


def write_past_checks(store: Store, row: str, values: dict[str, Any]) -> None:
    """Write a row from this process without the plane's checks."""
    if isinstance(store.plane, MemoryPlane):
        return store.plane.write_outside(store.partition, row, values)
    wire = store.plane._wire
    index, _ = store.plane._call("find", wire.find(store.partition, [row], create=True))
    with suppress(DataPlaneError):  # TransferQueue's own client also writes a row of another dtype
        store.plane._call("store", wire.store(store.partition, index, {name: [v] for name, v in values.items()}))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16)), (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.tensor(0.0)), (["a", "b"], ["c", 3]),
    ],
)  # fmt: skip
def test_rows_whose_types_do_not_go_together_are_refused(store: Store, first: Any, second: Any):
    name = "text" if isinstance(first, list) else "reward"
    write_past_checks(store, "00000000.0", {name: first})
    write_past_checks(store, "00000001.0", {name: second})
    meta = store.plane.adopt(store.partition, keys_of(2, 2), [name], {})
    with pytest.raises(DataPlaneError, match=r"values of different types in row 00000000\.0"):
        store.other.get(meta, [name], reader="train")


def test_what_the_controller_does_not_take_is_an_error(store: Store):
    if store.kind == "memory":
        return  # the memory plane checks the type of every row
    write_past_checks(store, "00000009.0", {"reward": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(DataPlaneError, match="TransferQueue refused: the controller rejects reward"):
        store.put(keys_of(1, 2), {"reward": torch.zeros(2)})


def test_adopt_wants_whole_groups_and_lengths(store: Store):
    with pytest.raises(DataPlaneError, match="no lengths of T; they split a ragged column"):
        store.plane.adopt(store.partition, keys_of(1, 2), ["logprobs"], {})
    with pytest.raises(DataPlaneError, match="a row is read from its first sample"):
        store.plane.adopt(store.partition, keys_of(2, 2)[1:], ["reward"], {})
    with pytest.raises(DataPlaneError, match="field 'gone' is not declared"):
        store.plane.adopt(store.partition, keys_of(2, 2), ["gone"], {})


def test_cache_serves_what_was_written_and_fetched_until_evicted(transfer_queue: TransferQueuePlane):
    other = TransferQueuePlane.attach(transfer_queue.settings)
    for plane in (transfer_queue, other):
        plane.register("cached", FIELDS, ["train"])
    columns = columns_of([2, 0, 5, 1])
    meta = transfer_queue.put(keys_of(2, 2), columns, partition="cached", stage="work")
    got = other.get(meta, NAMES, reader="train")  # fetched and cached
    eraser = TransferQueuePlane.attach(transfer_queue.settings)
    eraser.register("cached", FIELDS, ["train"])
    eraser.clear(meta)  # neither cache is notified
    for plane in (transfer_queue, other):
        for name in NAMES:
            assert_same(plane.get(meta, [name], reader="train")[name], columns[name])
        assert plane.get(meta.reorder([3, 0]), ["text"], reader="train")["text"] == [
            columns["text"][3],
            columns["text"][0],
        ]
        plane.evict([meta.placements[0].rows[0]])
        with pytest.raises(DataPlaneError, match=r"field 'reward' of row 00000000\.0 is not present"):
            plane.get(meta, ["reward"], reader="train")
        assert len(plane.get(meta.slice(2, 4), ["reward"], reader="train")["reward"]) == 2
    assert set(got) == set(NAMES)
    eraser.close()
    other.close()


def test_a_second_creator_is_refused_and_harms_nobody(transfer_queue: TransferQueuePlane, ray_session: Any):
    with pytest.raises(DataPlaneError) as caught:
        TransferQueuePlane.create()
    assert str(caught.value) == (
        "data plane: this Ray cluster already runs a TransferQueue; one cluster serves one run. "
        "Fix: end the other run, or start this one without joining its cluster"
    )

    @ray_session.remote(num_cpus=0)
    def create() -> str:
        from pipeline import DataPlaneError
        from pipeline.data_plane.transfer_queue import TransferQueuePlane

        try:
            TransferQueuePlane.create()
        except DataPlaneError as error:
            return str(error)
        return "created"

    assert ray_session.get(create.remote(), timeout=240) == str(caught.value)
    transfer_queue.register("after", FIELDS, ["train"])
    meta = transfer_queue.put(keys_of(1, 1), {"reward": torch.ones(1)}, partition="after", stage="work")
    transfer_queue.evict(meta.placements[0].rows)
    assert transfer_queue.get(meta, ["reward"], reader="train")["reward"].tolist() == [1]
    transfer_queue.clear(meta)


def test_only_the_creator_ends_it_and_a_closed_plane_refuses(transfer_queue: TransferQueuePlane):
    other = TransferQueuePlane.attach(transfer_queue.settings)
    other.close()
    other.close()
    other.register("gone", FIELDS, ["train"])
    with pytest.raises(DataPlaneError, match="the data plane is closed"):
        other.put([sample_key(0, 0)], {"reward": torch.zeros(1)}, partition="gone", stage="work")
    assert transfer_queue.row_count("gone") == 0


def test_everything_listens_on_loopback_only(transfer_queue: TransferQueuePlane):
    settings: Settings = transfer_queue.settings
    assert {address for _, address, _ in (settings.controller, *settings.storage)} == {"127.0.0.2"}
    for address in ("10.0.0.1", "192.168.1.9", "::", "0.0.0.0"):
        with pytest.raises(DataPlaneError, match=f"TransferQueue would listen on {address}; its sockets unpickle"):
            _check_address(address, trusted_network=False)
        _check_address(address, trusted_network=True)
    _check_address("::1", trusted_network=False)


LOST = """
    import os, signal, socket, threading, time
    from pipeline.data_plane.transfer_queue import TransferQueuePlane, environment
    os.environ.update(environment(deadline_s=6), RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", RAY_USAGE_STATS_ENABLED="0")
    import ray, torch
    from pipeline import Field
    from pipeline.errors import DataPlaneLost
    from pipeline.executors.placement import worker_environment
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
             object_store_memory=10**8, _node_ip_address="127.0.0.2",
             runtime_env={"env_vars": worker_environment(6)})
    plane = TransferQueuePlane.create(deadline_s=6, cache_bytes=0)
    plane.register("p", [Field("reward", "float32")], ["train"])
    put = lambda group: plane.put([f"{group:08d}_g000"], {"reward": torch.ones(1)}, partition="p", stage="work")
    meta = put(0)

    def lost(what, call):
        start = time.monotonic()
        try:
            call()
        except DataPlaneLost as error:
            assert time.monotonic() - start < 4.5, time.monotonic() - start
            print(what, "LOST", error, flush=True)

    def kill(actor, endpoint, port):
        ray.kill(actor)
        for _ in range(100):
            try:
                socket.create_connection((endpoint[1], endpoint[2][port]), timeout=1).close()
            except OSError:
                return
            time.sleep(0.05)

    unit = ray.get_actor("TransferQueueStorageUnit#0")
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    for group, (name, actor) in enumerate([("controller", controller), ("unit", unit)], 1):
        pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
        put(group)
        print(name, "SLOW", flush=True)

    kill(unit, plane.settings.storage[0], "put_get_socket")
    lost("unit", lambda: plane.get(meta, ["reward"], reader="train"))
    kill(controller, plane.settings.controller, "request_handle_socket")
    lost("get", lambda: plane.get(meta, ["reward"], reader="train"))
    lost("put", lambda: put(3))
    start = time.monotonic()
    plane.close()
    print("closed", time.monotonic() - start < 20, flush=True)
    os._exit(0)
"""


def test_a_slow_store_is_waited_for_and_a_lost_one_is_an_error_at_once(tmp_path):
    told = tmp_path / "told"  # not a pipe: Ray's own processes keep it open for a while
    with told.open("w") as file:
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(LOST)], cwd=REPOSITORY, stdout=file, stderr=file, timeout=240,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": "/tmp"} | FORKS,
        )  # fmt: skip
    said = told.read_text()
    lines = [line for line in said.splitlines() if "LOST" in line or "SLOW" in line or "closed" in line]
    why = "is lost; its process, or the machine that it ran on, has ended. Fix: resume the run"
    get = "reader 'train', get from 'p': get reward of 1 rows from 00000000.0 on: TransferQueue's"
    put = "stage 'work', put into 'p': put 1 rows from 00000003.0 on: TransferQueue's"
    assert [re.sub(r"unit TQ_\S+", "unit NAME", line) for line in lines] == [
        "controller SLOW", "unit SLOW",
        f"unit LOST {get} storage unit NAME {why}", f"get LOST {get} controller {why}",
        f"put LOST {put} controller {why}", "closed True",
    ], said[-4000:]  # fmt: skip


def test_a_controller_that_does_not_answer_leaves_no_context_that_waits(
    transfer_queue: TransferQueuePlane, monkeypatch: pytest.MonkeyPatch
):
    """The garbage collector would wait in such a context until the request is sent, so without an end."""
    from transfer_queue.storage.managers import base

    monkeypatch.setattr(base, "TQ_STORAGE_HANDSHAKE_MAX_RETRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name, at, ports = transfer_queue.settings.controller
        there = (name, at, dict(ports) | {"handshake_socket": silent.getsockname()[1]})
        before = open_contexts()
        with pytest.raises(DataPlaneLost, match="attach to TransferQueue"):
            TransferQueuePlane.attach(replace(transfer_queue.settings, controller=there))
        assert open_contexts() == before


def open_contexts() -> set[int]:
    """The ZeroMQ contexts of this process that are open."""
    made = [each for each in gc.get_objects() if type(each) in (zmq.Context, zmq.asyncio.Context)]
    return {id(each) for each in made if not each.closed}


def test_settings_are_plain_values(transfer_queue: TransferQueuePlane):
    import msgspec

    settings = replace(transfer_queue.settings, cache_bytes=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=Settings) == settings
    assert all(isinstance(value, str) for value in environment(9.0).values())


@pytest.mark.parametrize("parts", [None, {"a": ["reward"], "b": ["count"], "c": ["text"]}])
def test_lifetimes_cost_no_round_trips(transfer_queue: TransferQueuePlane, parts: dict[str, list[str]] | None):
    writer, reader = (TransferQueuePlane.attach(transfer_queue.settings) for _ in range(2))
    name = f"{len(parts or 'p')} lifetimes"
    columns = {"reward": torch.arange(4.0), "count": torch.zeros(4, 2, 3, dtype=torch.int32), "text": list("abcd")}
    for plane in (writer, reader):
        plane.register(name, [field for field in FIELDS if field.name in columns], ["train"], parts)
    meta = writer.put(keys_of(2, 2), columns, partition=name, stage="work")
    units = len(transfer_queue.settings.storage)
    # names to indexes, data, presence; what only one unit holds is announced when this one has answered
    assert 3 <= writer.counts["requests"] <= 1 + units + units
    reader.get(meta, [*columns], reader="train")
    assert 2 <= reader.counts["requests"] <= 1 + units
    before = reader.counts["requests"]
    reader.clear(meta)
    assert reader.counts["requests"] == before + 3  # names to indexes, data, indexes
    assert transfer_queue.row_count(name) == 0
    writer.close()
    reader.close()


def test_a_get_that_a_clear_overtakes_keeps_nothing(transfer_queue: TransferQueuePlane, monkeypatch: Any):
    writer, reader = (TransferQueuePlane.attach(transfer_queue.settings) for _ in range(2))
    for plane in (writer, reader):
        plane.register("overtaken", FIELDS, ["train"])
    meta = writer.put(keys_of(1, 2), {"reward": torch.ones(2)}, partition="overtaken", stage="work")
    load = reader._wire.load

    async def overtaken(*given: Any) -> Any:
        found = await load(*given)
        reader.evict(meta.placements[0].rows)
        return found

    monkeypatch.setattr(reader._wire, "load", overtaken)
    assert reader.get(meta, ["reward"], reader="train")["reward"].tolist() == [1, 1]
    writer.clear(meta)
    with pytest.raises(DataPlaneError, match="is not present"):
        reader.get(meta, ["reward"], reader="train")
    writer.close()
    reader.close()


def test_a_put_that_conflicts_ends_when_its_other_parts_are_written(
    transfer_queue: TransferQueuePlane, monkeypatch: Any
):
    plane = TransferQueuePlane.attach(transfer_queue.settings)
    fields = [field for field in FIELDS if field.name in ("reward", "count")]
    plane.register("conflicting", fields, ["train"], {"c.first": ["reward"], "c.second": ["count"]})
    put = partial(plane.put, keys_of(1, 2), partition="conflicting", stage="work")
    put({"reward": torch.ones(2)})
    store, stored = plane._wire.store, []

    async def late(partition: str, *given: Any) -> None:
        await asyncio.sleep(0.3)
        await store(partition, *given)
        stored.append(partition)

    monkeypatch.setattr(plane._wire, "store", late)
    with pytest.raises(DataPlaneError, match=r"field 'reward' .* already has different bytes"):
        put({"reward": torch.zeros(2), "count": torch.zeros(2, 2, 3, dtype=torch.int32)})
    assert stored == ["c.second"]
    plane.drain()
    plane.close()
