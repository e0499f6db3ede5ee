"""The guarantees of every data plane, tested in memory and with a real TransferQueue."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import DataPlaneError, KVBatchMeta
from pipeline.data_plane import row_name
from pipeline.data_plane.rows import same_bytes
from pipeline.declare.columns import Column, Ragged, concat, take
from pipeline.declare.handle import sample_key
from tests.examples import few

from .conftest import FIELDS, REWARD, Store

NAMES = [field.name for field in FIELDS]


def keys_of(groups: int, size: int, first: int = 0) -> list[str]:
    return [sample_key(first + g, i) for g in range(groups) for i in range(size)]


def columns_of(lengths: list[int], seed: int = 0) -> dict[str, Column]:
    """Return every field that the suite declares, with values that differ from entry to entry."""
    make = torch.Generator().manual_seed(seed)
    n, total = len(lengths), sum(lengths)
    quads = tuple(length % 3 for length in lengths)
    return {
        "reward": torch.randn(n, generator=make),
        "truncated": torch.rand(n, generator=make) < 0.5,
        "count": torch.randint(-9, 9, (n, 2, 3), generator=make, dtype=torch.int32),
        "response_ids": Ragged(torch.randint(0, 101, (total,), generator=make), tuple(lengths)),
        "logprobs": Ragged(-torch.rand(total, generator=make), tuple(lengths)),
        "halves": Ragged(torch.randn(total, generator=make).bfloat16(), tuple(lengths)),
        "pixels": Ragged(torch.randn(sum(quads), 2, generator=make).half(), quads),
        "text": [f"ünï {i} " * (length % 5) for i, length in enumerate(lengths)],
    }


def assert_same(got: Column, wanted: Column) -> None:
    """Check equal kind, lengths, dtype, shape and bytes."""
    assert type(got) is type(wanted)
    if isinstance(wanted, Ragged):
        assert got.lengths == wanted.lengths
        got, wanted = got.values, wanted.values
    if not isinstance(wanted, list):
        assert (got.dtype, got.shape, got.is_contiguous(), got.is_nested) == (wanted.dtype, wanted.shape, True, False)
    assert same_bytes(got, wanted)


lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=20)


@settings(max_examples=few(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=lengths_lists, size=st.integers(1, 6), data=st.data())
def test_every_column_comes_back_byte_for_byte_in_any_order(store: Store, lengths, size, data):
    store.plane.drain()
    keys = keys_of(len(lengths), size)[: len(lengths)]
    columns = columns_of(lengths, seed=data.draw(st.integers(0, 99)))
    cut = data.draw(st.integers(0, len(keys)))
    parts = [range(cut), range(cut, len(keys))]
    handles = [store.put([keys[i] for i in p], {n: take(c, p) for n, c in columns.items()}) for p in parts if len(p)]
    whole = KVBatchMeta.concat(handles)
    order = data.draw(st.permutations(range(len(keys))))[: data.draw(st.integers(0, len(keys)))]
    names = data.draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    for plane in (store.plane, store.other):
        for meta, index in ((whole, range(len(keys))), (whole.reorder(order), order)):
            got = plane.get(meta, names, reader="train")
            assert list(got) == names
            for name in names:
                assert_same(got[name], take(columns[name], index))


def test_fields_of_several_stages_are_read_together(store: Store):
    keys, lengths = keys_of(3, 2), [1, 0, 4, 2, 0, 3]
    columns = columns_of(lengths)
    rollout = store.put(keys, {name: columns[name] for name in ("response_ids", "text")})
    reward = [store.put(keys[i : i + 3], {"reward": columns["reward"][i : i + 3]}, attempt=i) for i in (0, 3)]
    joined = KVBatchMeta.join([rollout, KVBatchMeta.concat(reward)])
    got = store.other.get(joined.reorder([5, 0, 3]), ["text", "reward", "response_ids"], reader="prev")
    for name in got:
        assert_same(got[name], take(columns[name], [5, 0, 3]))


def test_parts_of_a_split_group_do_not_collide(store: Store):
    keys, columns = keys_of(2, 6), columns_of(list(range(12)))
    cuts = [range(0, 3), range(3, 5), range(5, 12)]
    handles = [store.put([keys[i] for i in c], {n: take(v, c) for n, v in columns.items()}) for c in cuts]
    assert [h.placements[0].rows for h in handles] == [
        ("00000000.0",), ("00000000.0.g003",), ("00000000.0.g005", "00000001.0"),
    ]  # fmt: skip
    got = store.other.get(KVBatchMeta.concat(handles), NAMES, reader="train")
    for name in NAMES:
        assert_same(got[name], columns[name])


def test_handle_says_what_is_present(store: Store):
    keys = keys_of(1, 2)
    meta = store.put(keys, {"response_ids": Ragged(torch.tensor([1, 2, 3]), (1, 2))}, unit="group")
    assert (meta.keys, meta.fields, meta.unit, meta.attempt) == (tuple(keys), ("response_ids",), "group", 0)
    assert (meta.lengths, meta.extra_info) == ({"T": (1, 2)}, {})
    assert meta.placements[0].rows == (row_name(keys[0], 0),)
    assert KVBatchMeta.decode(meta.encode()) == meta


def test_neither_direction_aliases_the_store(store: Store):
    keys, columns = keys_of(1, 2), columns_of([2, 3])
    wanted = {name: take(column, [0, 1]) for name, column in columns.items()}
    meta = store.put(keys, columns)
    for column in columns.values():
        (
            column.clear()
            if isinstance(column, list)
            else (column.values if isinstance(column, Ragged) else column).zero_()
        )
    for plane in (store.plane, store.plane, store.other, store.other):
        got = plane.get(meta, NAMES, reader="train")
        for name in NAMES:
            assert_same(got[name], wanted[name])
            column = got[name]
            (
                column.clear()
                if isinstance(column, list)
                else (column.values if isinstance(column, Ragged) else column).zero_()
            )


def test_a_part_does_not_hold_the_memory_of_the_whole(store: Store):
    meta = store.put(keys_of(1, 8), columns_of([9] * 8))
    got = store.other.get(meta.slice(2, 4), ["response_ids", "reward"], reader="train")
    assert got["response_ids"].values.untyped_storage().nbytes() == 2 * 9 * 8
    assert got["reward"].untyped_storage().nbytes() == 2 * 4


def test_gradients_and_strides_do_not_travel(store: Store):
    keys = keys_of(1, 4)
    strided = torch.arange(8.0)[::2].requires_grad_()
    meta = store.put(keys, {"reward": strided})
    got = store.other.get(meta, ["reward"], reader="train")["reward"]
    assert got.tolist() == [0, 2, 4, 6] and not got.requires_grad and got.is_contiguous()


def test_repeated_put_is_a_no_op_and_other_bytes_raise(store: Store):
    keys, columns = keys_of(3, 2), columns_of([1, 2, 3, 0, 2, 1])
    meta = store.put(keys, columns)
    assert store.put(keys, columns) == meta
    assert store.put(keys[2:4], {n: take(c, [2, 3]) for n, c in columns.items()}).keys == tuple(keys[2:4])
    for name in NAMES:
        other = columns_of([1, 2, 3, 0, 2, 1], seed=1)[name] if name != "text" else ["other"] * 6
        with pytest.raises(DataPlaneError, match=f"field '{name}' of row .* already has different bytes"):
            store.put(keys, {name: other})
    with pytest.raises(DataPlaneError, match=r"row 00000001\.0 already has"):  # only some of the rows exist
        store.put(keys_of(2, 2, first=1)[:4] + keys_of(1, 2, first=9), {"reward": torch.full((6,), 7.0)})
    assert_same(store.other.get(meta, ["reward"], reader="train")["reward"], columns["reward"])
    assert store.plane.row_count(store.partition) in (3, 4)  # TransferQueue creates a row before it has a field


def test_other_bytes_raise_beside_a_field_that_is_new_to_the_partition(store: Store):
    keys = keys_of(2, 2)
    store.put(keys, {"reward": torch.zeros(4)})
    with pytest.raises(DataPlaneError, match=r"field 'reward' of row 00000000\.0 already has different bytes"):
        store.put(keys, {"truncated": torch.zeros(4, dtype=torch.bool), "reward": torch.ones(4)})
    meta = store.put(keys, {"truncated": torch.ones(4, dtype=torch.bool), "reward": torch.zeros(4)})
    assert store.other.get(meta, ["truncated"], reader="train")["truncated"].all()


def test_negative_zero_is_not_zero(store: Store):
    keys = keys_of(1, 1)
    store.put(keys, {"reward": torch.tensor([0.0])})
    with pytest.raises(DataPlaneError, match="different bytes"):
        store.put(keys, {"reward": torch.tensor([-0.0])})


def test_attempts_are_fenced(store: Store):
    keys = keys_of(2, 2)
    old = store.put(keys, {"reward": torch.zeros(4)})
    new = store.put(keys, {"reward": torch.ones(4)}, attempt=1)
    store.put(keys, {"count": torch.zeros(4, 2, 3, dtype=torch.int32)})  # a late put of the old attempt
    assert store.other.get(new, ["reward"], reader="train")["reward"].tolist() == [1, 1, 1, 1]
    assert store.other.get(old, ["reward"], reader="train")["reward"].tolist() == [0, 0, 0, 0]
    assert store.other.presence(store.partition, keys, ["count"], attempt=1) == {"count": [False] * 4}
    store.plane.clear(old)
    assert store.other.get(new, ["reward"], reader="train")["reward"].tolist() == [1, 1, 1, 1]


def test_reading_what_is_not_there_raises(store: Store):
    keys = keys_of(2, 2)
    meta = store.put(keys, {"reward": torch.zeros(4)})
    ghost = KVBatchMeta.join([meta, store.plane.adopt(store.partition, keys, ["count"], {})])
    for plane in (store.plane, store.other):
        with pytest.raises(DataPlaneError, match=r"field 'count' of row 00000000\.0 is not present"):
            plane.get(ghost, ["reward", "count"], reader="train")
    store.plane.clear(meta)
    for plane in (store.plane, store.other):
        with pytest.raises(DataPlaneError, match=r"field 'reward' of row 00000000\.0 is not present"):
            plane.get(meta, ["reward"], reader="train")


def test_clear_is_idempotent_and_takes_what_the_handle_names(store: Store):
    keys = keys_of(4, 2)
    meta = store.put(keys, {"reward": torch.arange(8.0)})
    store.plane.clear(meta.slice(0, 4))
    store.plane.clear(meta.slice(0, 4))
    assert store.plane.row_count(store.partition) == 2
    rest = store.other.get(meta.slice(4, 8), ["reward"], reader="train")["reward"]
    assert rest.tolist() == [4, 5, 6, 7]
    with pytest.raises(DataPlaneError, match="not present"):
        store.other.get(meta.slice(3, 5), ["reward"], reader="train")
    again = store.put(keys[:4], {"reward": torch.full((4,), 9.0)})
    assert store.other.get(again, ["reward"], reader="train")["reward"].tolist() == [9] * 4
    store.plane.clear(meta)
    store.plane.clear(meta)
    assert store.plane.row_count(store.partition) == 0


def test_drain_leaves_nothing(store: Store):
    store.put(keys_of(3, 2), {"reward": torch.zeros(6)})
    store.plane.drain()
    assert store.plane.row_count(store.partition) == 0
    store.plane.drain()


def test_reading_no_sample_gives_empty_columns(store: Store):
    meta = store.put(keys_of(1, 2), columns_of([1, 2]))
    empty = store.other.get(meta.slice(0, 0), NAMES, reader="train")
    for name, column in columns_of([1, 2]).items():
        assert_same(empty[name], take(column, []))
    assert store.other.get(meta, [], reader="train") == {}


def test_two_readers_each_get_every_row(store: Store):
    meta = store.put(keys_of(2, 2), {"reward": torch.arange(4.0)})
    for reader in ("train", "prev"):
        assert store.other.get(meta, ["reward"], reader=reader)["reward"].tolist() == [0, 1, 2, 3]


def test_puts_and_gets_from_many_threads_lose_nothing(store: Store):
    failed: list[BaseException] = []
    handles: dict[int, KVBatchMeta] = {}

    def work(worker: int) -> None:
        try:
            for turn in range(6):
                group = worker * 6 + turn
                columns = columns_of([worker, turn, 1], seed=group)
                handles[group] = store.put(keys_of(1, 3, first=group), columns)
                got = store.other.get(handles[group], NAMES, reader="train")
                for name in NAMES:
                    assert_same(got[name], columns[name])
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and len(handles) == 36
    whole = KVBatchMeta.concat([handles[group] for group in sorted(handles)])
    wanted = concat([columns_of([g // 6, g % 6, 1], seed=g)["response_ids"] for g in range(36)])
    assert_same(store.other.get(whole, ["response_ids"], reader="train")["response_ids"], wanted)


def test_rows_stay_flat_over_many_cycles(store: Store):
    columns = {"reward": torch.zeros(4), "response_ids": Ragged(torch.arange(6), (0, 1, 2, 3))}
    for cycle in range(1000 if store.kind == "memory" else 80):
        meta = store.put(keys_of(2, 2, first=2 * cycle), columns)
        assert_same(store.other.get(meta, ["response_ids"], reader="train")["response_ids"], columns["response_ids"])
        store.plane.clear(meta)
        if cycle % 40 == 0:
            assert store.plane.row_count(store.partition) == 0
    assert store.plane.row_count(store.partition) == 0


def test_presence_is_what_was_put(store: Store):
    keys = keys_of(3, 2)
    store.put(
        keys[:4], {"reward": torch.zeros(4), "response_ids": Ragged(torch.zeros(3, dtype=torch.int64), (1, 0, 2, 0))}
    )
    store.put(keys[2:], {"text": ["a"] * 4})
    seen = store.other.presence(store.partition, [*keys, sample_key(0, 5)], ["reward", "response_ids", "text", "count"])
    assert seen["reward"] == [True] * 4 + [False] * 3  # sample 5 of group 0 is beyond the row
    assert seen["response_ids"][:6] == [True] * 4 + [False] * 2
    assert seen["text"][:6] == [False] * 2 + [True] * 4
    assert seen["count"] == [False] * 7
    assert store.other.presence(store.partition, [], ["reward"]) == {"reward": []}


def test_same_registration_is_a_no_op(store: Store):
    store.plane.register(store.partition, list(reversed(FIELDS)), ["prev", "train"])
    both, tighter = ["train", "prev"], [*FIELDS[1:], REWARD.bounded(low=0)]
    for fields, readers in (([REWARD], both), (FIELDS, ["train"]), (tighter, both)):
        with pytest.raises(DataPlaneError, match="already registered with a different"):
            store.plane.register(store.partition, fields, readers)
