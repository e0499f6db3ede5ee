"""KVBatchMeta: what it carries through every operation, how small it stays, and what it refuses."""

from __future__ import annotations

import pickle

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import KVBatchMeta
from pipeline.data_plane.rows import lay_out
from pipeline.meta import SIZE_CAP_BYTES_PER_SAMPLE, Placement, sample_key


def handle(lengths: list[int], group: int = 2, partition: str = "p", first: int = 0, **changes) -> KVBatchMeta:
    keys = tuple(sample_key(first + i // group, i % group) for i in range(len(lengths)))
    shared = lay_out(keys, 0, {"T": tuple(lengths)}).placement
    return KVBatchMeta(
        keys=keys, partition_id=partition, fields=("ids", "reward"), lengths={"T": tuple(lengths)},
        placements=(shared,), placement_of={"ids": 0, "reward": 0},
        tags=tuple({"i": i, "key": key} for i, key in enumerate(keys)), **changes,
    )  # fmt: skip


lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=24)


@given(lengths_lists, st.integers(1, 8))
def test_round_trips_under_the_size_cap(lengths, group):
    before = handle(lengths, group, extra_info={"order": [1, 2], "note": "x"}, unit="group", attempt=3)
    encoded = before.encode()
    assert len(encoded) <= SIZE_CAP_BYTES_PER_SAMPLE * max(4, len(before))
    assert KVBatchMeta.decode(encoded) == before
    assert pickle.loads(pickle.dumps(before)) == before


def test_size_does_not_depend_on_the_tokens():
    assert len(handle([30_000] * 64).encode()) - len(handle([100] * 64).encode()) < 64 * 8
    with pytest.raises(ValueError, match="tags and extra_info are for small values"):
        handle([1], extra_info={"text": "x" * 5000}).encode()


def test_holds_no_tensor():
    with pytest.raises((TypeError, msgspec.ValidationError)):
        handle([1], extra_info={"tensor": torch.zeros(1)}).encode()


def rows_agree(meta: KVBatchMeta) -> None:
    """Tags, lengths and placements belong to their keys, whatever was done to the handle."""
    for i, key in enumerate(meta.keys):
        assert meta.tags[i]["key"] == key
        for field in meta.fields:
            placement = meta.placement(field)
            assert placement.rows[placement.row[i]] == f"{key[:8]}.0"
            assert placement.position[i] == int(key[-3:])
    for placement in meta.placements:
        assert set(placement.row) == set(range(len(placement.rows)))


@given(lengths_lists, st.data())
def test_reorder_slice_chunk_and_concat_carry_everything(lengths, data):
    whole = handle(lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    shuffled = whole.reorder(order)
    rows_agree(shuffled)
    assert shuffled.sequence_lengths == tuple(lengths[i] for i in order)
    start, stop = sorted((data.draw(st.integers(0, len(lengths))), data.draw(st.integers(0, len(lengths)))))
    assert shuffled.slice(start, stop).keys == shuffled.keys[start:stop]
    parts = shuffled.chunk(data.draw(st.integers(1, 9)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    back = KVBatchMeta.concat(parts)
    rows_agree(back)
    assert (back.keys, back.lengths, back.tags) == (shuffled.keys, shuffled.lengths, shuffled.tags)
    restored = back.reorder([order.index(i) for i in range(len(lengths))])
    assert (restored.keys, restored.lengths) == (whole.keys, whole.lengths)
    assert [restored.placement("ids").offsets["T"]] == [whole.placement("ids").offsets["T"]]


@given(lengths_lists, st.data())
def test_join_keeps_each_fields_own_place(lengths, data):
    left = handle(lengths).select("ids")
    cut = data.draw(st.integers(0, len(lengths) - 1))
    parts = [lay_out(keys, 1, {}).placement for keys in (left.keys[:cut], left.keys[cut:]) if keys]
    right = KVBatchMeta(
        keys=left.keys, partition_id="p", fields=("reward",), placements=(Placement.chain(parts),),
        placement_of={"reward": 0}, attempt=1,
    )  # fmt: skip
    joined = KVBatchMeta.join([left, right])
    assert joined.fields == ("ids", "reward") and joined.sequence_lengths == tuple(lengths)
    assert joined.placement("ids") == left.placement("ids")
    assert joined.placement("reward") == right.placement("reward")
    assert joined.attempt == 1 and joined.tags == left.tags
    only = KVBatchMeta.join([left, right], fields=("reward",))
    assert only.fields == ("reward",) and len(only.placements) == 1


def test_concat_keeps_fields_that_lie_in_different_rows_apart():
    def joined(first):
        ids = handle([3, 2], first=first).select("ids")
        reward = msgspec.structs.replace(handle([3, 2], first=first).select("reward"), attempt=1)
        return KVBatchMeta.join([ids, reward])

    both = KVBatchMeta.concat([joined(0), joined(5)])
    assert len(both.placements) == 2 and both.placement_of == {"ids": 0, "reward": 1}
    rows_agree(both)


def test_refuses_what_does_not_belong_together():
    with pytest.raises(ValueError, match="partitions"):
        KVBatchMeta.concat([handle([1]), handle([1], partition="q", first=1)])
    with pytest.raises(ValueError, match="different fields"):
        KVBatchMeta.concat([handle([1]), handle([1], first=1).select("ids")])
    with pytest.raises(ValueError, match="not distinct"):
        KVBatchMeta.concat([handle([1]), handle([1])])
    with pytest.raises(ValueError, match="same keys"):
        KVBatchMeta.join([handle([1, 2]), handle([1, 2]).reorder([1, 0])])
    with pytest.raises(ValueError, match="2 tags for 1 keys"):
        KVBatchMeta(keys=("a",), partition_id="p", fields=(), tags=({}, {}))
    with pytest.raises(KeyError, match="handle has ids, reward; asked for gone"):
        handle([1]).select("gone")


@settings(max_examples=20)
@given(lengths_lists)
def test_extra_info_is_never_shared(lengths):
    before = handle(lengths, extra_info={"a": 1})
    made = [
        before.select("ids"), before.reorder(range(len(lengths))), before.slice(0, 1), *before.chunk(2),
        KVBatchMeta.concat([before]), KVBatchMeta.join([before]), KVBatchMeta.decode(before.encode()),
    ]  # fmt: skip
    for other in made:
        other.extra_info["b"] = 2
        assert before.extra_info == {"a": 1}
    first, second = (KVBatchMeta(keys=(), partition_id="p", fields=()) for _ in range(2))
    first.extra_info["b"] = 2
    assert second.extra_info == {}
